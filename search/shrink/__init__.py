"""Make a smaller checkpoint from a checkpoint and files of requests, in one command."""
