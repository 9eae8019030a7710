"""What is read from the command line, and shared by several commands."""
