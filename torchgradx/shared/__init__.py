"""What all samples share: its gradient by sample, from where in the graph samples come in."""
