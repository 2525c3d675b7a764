"""Writes quantized matrices as others store them: the tensors of a layer, and what config.json says. Numpy alone."""
