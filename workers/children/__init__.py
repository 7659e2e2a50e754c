"""Processes of our own: functions that are called in a Python process which ends with its parent."""
