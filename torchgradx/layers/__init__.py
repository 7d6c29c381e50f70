"""A model before any data: its parameters, its layers, and the kernel for each of them."""
