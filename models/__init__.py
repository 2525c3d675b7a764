"""Model families in plain torch plus the llmc ops."""
