"""The routes under /api, which exchange JSON."""
