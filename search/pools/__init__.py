"""Where evaluations run: worker actors on Ray, or this process."""
