"""Writes a quantized model as one GGUF file, with the writer in llama.cpp's `gguf` package."""
