"""Use cases: what users can ask of a store, a server or this machine; a record per verb, which answers itself."""
