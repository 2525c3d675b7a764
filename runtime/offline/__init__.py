"""Batches of prompts from files: read, answered, kept and resumed."""
