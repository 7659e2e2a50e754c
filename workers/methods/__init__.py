"""What genomes express to: edits, and how each kind is made on a model, calibrated, watched and exported."""
