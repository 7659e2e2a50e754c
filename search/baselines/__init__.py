"""One-shot baselines for EEP genomes: each a function of what a calibration measured, and the start of a search."""
