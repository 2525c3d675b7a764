"""Guided decoding: constraints on continuations, and the token masks that enforce them."""
