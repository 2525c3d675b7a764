"""A conversation with a model: its messages, its answers, and what fits the context."""
