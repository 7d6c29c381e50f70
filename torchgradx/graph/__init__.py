"""Reads a forward's autograd graph, without its modules: nodes, saved tensors, samples of rows."""
