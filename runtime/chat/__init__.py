"""A conversation with a model: messages, answers, and fitting them into the context."""
