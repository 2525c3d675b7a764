"""The version of llmc: in reports, in keys of the cache, in what servers say of themselves."""

__version__ = "0.1.0"
