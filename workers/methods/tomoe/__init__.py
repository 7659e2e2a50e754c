"""ToMoE's edits: masks on networks and heads."""
