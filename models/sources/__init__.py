"""Model sources: one file or folder per format, implementing the classes of `base.py`."""
