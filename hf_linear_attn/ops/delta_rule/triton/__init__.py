"""Triton kernels of the delta rule."""
