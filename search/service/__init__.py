"""Use cases: what each command does, as functions that return records and print nothing."""
