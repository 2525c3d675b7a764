"""What ends a measurement."""


class BenchError(RuntimeError):
    """A measurement that cannot be made or kept; the message is one sentence."""
