"""Kernels of GPUs: groups of work items share the work; what has no kernel of its own here is the plain one."""
