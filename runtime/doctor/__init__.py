"""What this machine is to llmc, and what would make it serve faster: the checks of `llmc doctor`."""
