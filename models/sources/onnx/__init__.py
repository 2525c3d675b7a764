"""Models in ONNX: graphs as exporters write them, of which the structure and the weights are recovered."""
