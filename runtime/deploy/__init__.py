"""Replicas on a Ray cluster: Ray Serve places, scales and heals them, and the router of `llmc route` is before them."""
