"""Gradients by sample of one parameter, as the factors that they are made of."""
