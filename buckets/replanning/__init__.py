"""Replanning from a server's own traffic: histogram of steps, costs, search and proposal. Plain data only."""
