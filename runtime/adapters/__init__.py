"""LoRA adapters loaded while the model serves, and selected by name."""
