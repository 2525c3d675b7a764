"""From blocks of a quantized tensor to float32, bit for bit as the gguf package of llama.cpp has it.

A function takes blocks, uint8 [blocks, bytes of a block], and gives their `Parts`. One file for a kind of blocks.
"""
