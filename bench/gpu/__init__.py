"""Attention, moving and codecs on a GPU beside torch: `python -m bench.gpu`, on a machine that has one."""
