"""ONNX models: recovers structure and weights from exported graphs."""
