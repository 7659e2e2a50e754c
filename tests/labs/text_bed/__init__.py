"""The model of `configs/demo/text`: a small mixture of experts that is trained on installed text."""
