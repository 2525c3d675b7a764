"""GGUF, the format of llama.cpp: one file, or several, with the metadata, the tokenizer and the tensors of a model."""
