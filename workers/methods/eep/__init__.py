"""EEP's edits: router mappings and merged experts."""
