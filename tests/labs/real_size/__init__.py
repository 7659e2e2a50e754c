"""The lab of real size: published models of few layers, and what a GPU is asked of them."""
