"""Looking into a graph: its commands one at a time, what each writes, and two artifacts compared."""
