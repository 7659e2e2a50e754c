"""Generates answers with vLLM, which runs in an environment of its own."""
