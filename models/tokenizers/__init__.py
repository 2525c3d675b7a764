"""Converts tokenizers of other formats to tokenizer.json, which the runtime reads; one writer for all formats."""
