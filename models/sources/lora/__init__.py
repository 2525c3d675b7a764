"""LoRA adapters merged into a model's weights."""
