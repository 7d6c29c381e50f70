"""What is known of a model before any data: its parameters, its layers, their kernels."""
