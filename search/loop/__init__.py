"""The population loop: it makes individuals, has them evaluated, records them, and selects the winner."""
