"""From GGUF metadata to the tokenizer files of a Hugging Face model, which the runtime reads."""
