"""What is done before the first request: memory budgeted, graphs replayed, costs measured."""
