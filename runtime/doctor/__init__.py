"""The checks of `llmc doctor`: this machine's suitability for llmc, and what would make it serve faster."""
