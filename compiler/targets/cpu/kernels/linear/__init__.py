"""The linear kernels. Each combines a problem, a reader of the weight, a micro-kernel, loops, and an epilogue."""
