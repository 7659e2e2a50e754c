"""From a checkpoint and files of requests to a smaller checkpoint, in one command."""
