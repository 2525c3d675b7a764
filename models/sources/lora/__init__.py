"""LoRA adapters that are merged into the weights of a model."""
