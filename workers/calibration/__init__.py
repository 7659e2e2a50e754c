"""What genomes start from: measured once per model and data, by a worker."""
