"""Worker side: model loading, edits, generation, Ray actors and export."""
