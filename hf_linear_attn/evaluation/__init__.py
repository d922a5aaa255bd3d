"""Long-context evaluation: retrieval tasks, perplexity, latency and the reports written from them."""
