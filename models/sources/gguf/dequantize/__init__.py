"""Dequantizes blocks to float32, bit-identical to llama.cpp's gguf package.

Each function maps blocks, uint8 [blocks, bytes of a block], to `Parts`. One file per kind of block.
"""
