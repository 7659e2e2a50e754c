"""How many experts each layer keeps, how wide and how often active they are, as a genome of a few numbers."""
