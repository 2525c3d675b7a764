"""The linear kernels: problem × reader of the weight × micro-kernel × loops × epilogue."""
