"""Tasks: their YAML files, their data, their prompts."""
