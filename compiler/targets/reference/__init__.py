"""The reference target: every kernel written the obvious way, on rows as they lie; what other targets are judged by."""
