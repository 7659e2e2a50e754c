"""The lab of real size: published models of few layers, a metered device, and processes with limited host memory."""
