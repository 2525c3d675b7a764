"""Writes a quantized model as one GGUF file, by the writer of llama.cpp's `gguf` package."""
