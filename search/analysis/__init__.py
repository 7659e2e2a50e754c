"""Use cases that tell what stored searches found."""
