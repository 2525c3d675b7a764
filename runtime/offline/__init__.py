"""Batches of prompts from files: reading, running, storing and resuming."""
