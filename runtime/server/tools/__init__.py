"""Tool calls: what a chat request's tools mean for its prompt, its constraint and the reading of its answer."""
