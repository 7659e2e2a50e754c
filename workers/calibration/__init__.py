"""What genomes of dense models start from: measured once per model and data, by a worker."""
