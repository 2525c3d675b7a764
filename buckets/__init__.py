"""Buckets, ladders and selection; pure Python."""
