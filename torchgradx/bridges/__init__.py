"""Into the tools that people train with; nothing here is imported before it is asked for.

`bridges.lightning` and `bridges.transformers` hold a callback each, `bridges.opacus` our kernels
for its ghost clipping. `pip install "torchgradx[bridges]"` brings what they stand on.
"""
