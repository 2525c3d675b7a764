"""Conversion between text and token ids: tokenizers and chat templates."""
