"""Images in prompts: how a model's pictures are cut, how they stand in its text, and how a model says so.

Compiler and runtime share it. It computes with sizes and texts alone: pixels are the runtime's.
"""
