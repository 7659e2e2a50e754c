"""The population loop: makes individuals, has them evaluated, records them, and says who won."""
