"""What a search would take, before it is launched: memory, operations and hours."""
