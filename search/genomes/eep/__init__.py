"""EEP: router-mapping and expert-merging matrices (arXiv 2407.00945)."""
