"""GPU kernels in which groups of work items cooperate; ops without one here use the reference kernel."""
