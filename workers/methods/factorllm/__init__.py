"""FactorLLM's edits: networks divided into experts."""
