"""Which algorithm runs: integers in, a plan out. No tensors."""
