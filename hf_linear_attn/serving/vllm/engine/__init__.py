"""What imports vLLM: nothing outside of this folder does."""
