"""Descriptions of the supported model families."""
