"""Task files found and read, and their splits made ready to be scored."""
