"""The choice of an algorithm: integers in, a plan out. No tensors."""
