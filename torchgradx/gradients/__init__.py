"""Per-sample gradients of one parameter, mostly as factors rather than as tensors [N, *shape]."""
