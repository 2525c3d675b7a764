"""Reports as single HTML files: one style, no requests, no build step."""
