"""Completion scripts of shells, generated from the command line's parser, so that a key press starts no Python."""
