"""The reference target: every kernel in its plainest form, on row-major data; other targets are checked against it."""
