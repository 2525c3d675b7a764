"""One file per model family: its exact model_type, the meaning of its config, and the names of its weights."""
