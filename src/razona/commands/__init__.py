"""One file is one command of the command line."""
