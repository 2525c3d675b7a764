"""Methods that look at what a layer's inputs are like before they round its weight. Numpy alone."""
