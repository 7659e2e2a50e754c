"""Driver side: genomes, operators, strategies, the population loop and the command line."""
