"""What is kept: the graph cache and its keys, artifacts, weights and bundles."""
