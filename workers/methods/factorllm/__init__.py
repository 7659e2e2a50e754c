"""FactorLLM: dense networks divided into experts with linear routers."""
