"""What commands print that takes more than a few lines: tables of one kind of record each, and progress."""
