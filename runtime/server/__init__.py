"""`llmc serve`: an OpenAI-compatible HTTP server over the engine. Imports neither torch nor tvm."""
