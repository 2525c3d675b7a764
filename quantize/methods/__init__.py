"""Methods that use statistics of a layer's inputs to round its weight. Numpy alone."""
