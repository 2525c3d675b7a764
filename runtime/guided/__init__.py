"""Guided decoding: what a continuation must look like, and the masks that keep it so."""
