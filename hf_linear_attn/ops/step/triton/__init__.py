"""The decode step in Triton."""
