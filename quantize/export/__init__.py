"""Writes quantized matrices in other tools' layouts: the tensors of a layer, and the settings in config.json. Numpy
alone."""
