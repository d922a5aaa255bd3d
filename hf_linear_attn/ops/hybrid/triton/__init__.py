"""Steps and texts of layers with a window, in Triton."""
