"""The HTTP server: an API over a store, the pages on top of it, and what keeps strangers out."""
