"""A run's configuration: frozen, checked values, and the YAML files they are read from."""
