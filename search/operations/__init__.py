"""Use cases: functions that take a store and a request and return records."""
