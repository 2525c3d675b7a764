"""Completion scripts of shells, written from the command line's own parser: a key press starts no Python."""
