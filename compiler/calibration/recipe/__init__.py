"""Chooses a format per layer: the smallest model whose predictions change by no more than requested."""
