"""What targets share whose code is a shared library for the host to load: linking kernels."""
