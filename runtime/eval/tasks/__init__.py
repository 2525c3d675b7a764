"""Templates of tasks on local data, and the code that they run."""
