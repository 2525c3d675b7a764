"""Stored results: the graph cache and its keys, artifacts, weights and bundles."""
