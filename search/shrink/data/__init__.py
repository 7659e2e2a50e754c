"""Reads the files of requests that users bring, and makes them tasks."""
