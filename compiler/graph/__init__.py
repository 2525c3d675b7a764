"""How a model becomes command lists: traced once, bound to a bucket, lowered and emitted."""
