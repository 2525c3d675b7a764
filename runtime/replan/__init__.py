"""A server that plans its own buckets: what it ran, what it would change, and changing it while it serves."""
