"""Runs artifacts; imports neither torch nor tvm."""
