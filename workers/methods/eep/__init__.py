"""EEP: expert pruning and merging by router mappings and merging matrices."""
