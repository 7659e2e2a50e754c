"""Tasks: settings, data, selection of rows, and rendering of prompts."""
