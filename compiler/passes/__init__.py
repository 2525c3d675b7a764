"""Relax passes, one a file."""
