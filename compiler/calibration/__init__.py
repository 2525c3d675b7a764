"""Quantizes checkpoints with the help of text, and writes them as checkpoints: what `llmc quantize -o` does."""
