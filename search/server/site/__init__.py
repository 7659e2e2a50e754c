"""The HTTP application and the process that serves it."""
