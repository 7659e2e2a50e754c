"""Reports: one HTML page about one search."""
