"""What cells of two or more chapters compute with, a module for each subject."""
