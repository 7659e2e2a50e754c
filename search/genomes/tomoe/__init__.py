"""ToMoE: experts as overlapping masks on dense networks and attention heads."""
