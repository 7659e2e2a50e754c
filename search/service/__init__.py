"""The service that answers requests, from a store or from a server."""
