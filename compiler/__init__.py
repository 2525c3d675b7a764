"""Compile time: checkpoint to artifact."""
