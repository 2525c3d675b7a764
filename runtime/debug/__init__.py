"""Debugging of graphs: runs commands one at a time, dumps their outputs, and compares two artifacts."""
