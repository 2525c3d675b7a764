"""One plain kernel an op: scalars, float32, row-major tensors, every sum in ascending order."""
