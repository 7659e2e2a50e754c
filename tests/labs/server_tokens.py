"""Tokens of served stores in tests."""

READ, WRITE = "r" * 32, "w" * 32
