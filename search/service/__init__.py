"""Requests, and the functions that answer them."""
