"""HTTP server over a store: the API under /api, the pages for browsers, and the access control around both."""
