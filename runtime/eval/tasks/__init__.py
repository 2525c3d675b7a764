"""Templates of tasks with local data, and what they run."""
