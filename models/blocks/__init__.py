"""The modules that model families are built from."""
