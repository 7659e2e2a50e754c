"""NanoMoE's edits: block-mixed linear layers."""
