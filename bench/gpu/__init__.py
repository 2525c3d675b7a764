"""Judging and measuring on a GPU: run.sh."""
