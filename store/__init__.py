"""The SQL store of searches, individuals, evaluations and lineage."""
