"""Quantizes checkpoints with calibration text and writes the result as a checkpoint: `llmc quantize -o`."""
