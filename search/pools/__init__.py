"""Where evaluations run: worker actors on Ray, or this process; and sending a search to a cluster."""
