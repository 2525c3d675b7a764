"""Which layer gets which format, so that a model is small and its predictions change by no more than is asked for."""
