"""Images in prompts: from the bytes of a picture to rows that take the place of tokens."""
