"""Facts of a model that need no data: its parameters, its layers, their kernels."""
