"""Targets that are GPUs: one source of kernels, and for each kind how its language is written and built."""
