"""From tokenizers of other formats to tokenizer.json, which is what the runtime reads; one writer for all formats."""
