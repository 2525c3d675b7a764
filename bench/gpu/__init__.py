"""Checks and benchmarks on a GPU; run.sh runs them."""
