"""Proves where the samples are in each use of a layer, and that the record misses no gradient."""
