"""What can be proved or tested about the draws and the mechanisms: each function returns figures with their error."""
