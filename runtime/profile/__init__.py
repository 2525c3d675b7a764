"""Where the time of a graph goes, command by command."""
