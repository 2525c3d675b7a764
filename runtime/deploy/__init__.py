"""Replicas on a Ray cluster: Ray Serve places, scales and restarts them behind the router of `llmc route`."""
