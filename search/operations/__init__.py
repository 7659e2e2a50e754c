"""Use cases: a store and a request in, a record out."""
