"""Families that transformers lacks, in plain torch after what their authors publish; nothing of llmc is used."""
