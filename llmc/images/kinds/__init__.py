"""Kinds of images, one file each: how a picture of any size is cut, and the text that stands for it."""
