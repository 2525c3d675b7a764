"""From a model to command lists: traced once, then bound, lowered and emitted per bucket."""
