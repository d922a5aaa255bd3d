"""Steps and texts of layers with a window as loops on a CPU."""
