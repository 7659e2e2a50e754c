"""Data types and interfaces between drivers, workers and methods."""
