"""Attention over a window in Triton."""
