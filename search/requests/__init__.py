"""Requests: what users can ask of a store, a server or this machine, as one frozen record per verb."""
