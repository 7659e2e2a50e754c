"""Stores as a whole: checked, pruned, and copied from one database to another."""
