"""FactorLLM: dense networks divided into experts (arXiv 2408.11855)."""
