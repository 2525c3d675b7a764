"""One endpoint for many replicas: `llmc route`."""
