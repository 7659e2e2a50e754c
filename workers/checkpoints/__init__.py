"""Reading and writing the files of checkpoints."""
