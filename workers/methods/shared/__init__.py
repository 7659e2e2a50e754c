"""What several methods use: dense networks, input statistics, fits of outputs, spectra."""
