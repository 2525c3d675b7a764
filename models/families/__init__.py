"""One file per model family: its exact model_type, what its config means and where its weights are."""
