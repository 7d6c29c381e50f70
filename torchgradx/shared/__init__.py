"""Gradients by sample of what all samples share, from where in the graph samples come in."""
