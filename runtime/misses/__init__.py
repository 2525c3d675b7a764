"""Bucket misses of a running engine: watched, recorded, and compiled for in the background."""
