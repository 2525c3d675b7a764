"""What-if: runs a trace through the real scheduler in virtual time, and reports the result."""
