"""Reports as single HTML files: one look, no request, no build step."""
