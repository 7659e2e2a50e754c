"""Running a recorded search to its end."""
