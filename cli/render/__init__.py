"""Output of commands in a terminal."""
