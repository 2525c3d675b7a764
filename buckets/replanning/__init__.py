"""What buckets a server's own traffic asks for: histogram of its steps, costs, search and proposal. Plain data only."""
