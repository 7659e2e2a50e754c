"""FactorLLM: dense networks partitioned into experts (arXiv 2408.11855)."""
