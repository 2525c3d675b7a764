"""A server that replans its own buckets: observes steps, proposes changes, and applies them while serving."""
