"""Codecs on a GPU, over paged memory; the kernels' sources."""
