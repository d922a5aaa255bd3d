"""Features of learned maps in Triton."""
