"""NanoMoE: linear layers as block-mixed factors."""
