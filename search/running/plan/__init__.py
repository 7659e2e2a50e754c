"""What a search would take: memory, operations and hours, before it is launched."""
