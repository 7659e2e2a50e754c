"""A checkpoint as a worker holds it: described, loaded, resident."""
