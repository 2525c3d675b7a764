"""LoRA adapters that are loaded while the model serves, and chosen by name."""
