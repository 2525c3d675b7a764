"""GPU targets: kernels with one common source, and per kind of GPU the language and the build."""
