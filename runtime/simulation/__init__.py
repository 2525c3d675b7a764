"""What-if: a trace through the real scheduler, in virtual time, and what it tells."""
