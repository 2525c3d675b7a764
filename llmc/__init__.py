"""llmc: ahead-of-time compiler and bucketed graph runtime for large language models."""

__version__ = "0.1.0"
