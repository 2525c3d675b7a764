"""From a GGUF file's metadata to the tokenizer files of a Hugging Face model, which is what the runtime reads."""
