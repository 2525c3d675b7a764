"""Builds the documentation site: pages from outside docs/, references made of the code, and what must hold of both."""
