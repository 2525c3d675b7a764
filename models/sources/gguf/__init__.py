"""GGUF, llama.cpp's format: a model's metadata, tokenizer and tensors in one file or several."""
