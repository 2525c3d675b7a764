"""Ranks of an artifact on a Ray cluster: Ray chooses their nodes, MPICH's mpiexec starts them and carries messages."""
