"""What search and workers say to each other: settings, facts of models, edits, calibrations, messages."""
