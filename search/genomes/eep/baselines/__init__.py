"""One-shot choices of experts that a search can start from and is compared with."""
