"""Finding and reading task files, and preparing their splits for scoring."""
