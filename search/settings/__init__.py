"""Settings that genomes are made with: phases, and the base of all sections."""
