"""What can be proved or tested of the draws and the mechanisms: each function returns figures with their error."""
