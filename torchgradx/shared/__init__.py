"""Per-sample gradients of parameters whose uses are shared by all samples."""
