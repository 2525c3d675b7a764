"""Tool calls: how a chat request's tools affect its prompt, its constraint and the parsing of its answer."""
