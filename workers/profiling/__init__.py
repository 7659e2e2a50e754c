"""What models cost: counted from their configs, and measured."""
