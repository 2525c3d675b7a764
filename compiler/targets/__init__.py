"""Exact target descriptions."""
