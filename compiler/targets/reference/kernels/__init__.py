"""One plain kernel per op: scalar code, float32, row-major tensors, every sum in ascending order."""
