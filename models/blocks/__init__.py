"""The modules that the families are built of."""
