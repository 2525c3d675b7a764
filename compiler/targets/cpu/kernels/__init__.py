"""TIR kernel templates, one family a file."""
