"""Where a model comes from: one file or folder per format, behind the classes of `base.py`."""
