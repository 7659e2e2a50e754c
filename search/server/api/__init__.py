"""The routes under /api, a file for each kind of thing."""
