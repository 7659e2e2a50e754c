"""`tasks`."""

from __future__ import annotations

import moevolve
from moevolve.search.cli._console import print_json, print_table
from moevolve.search.cli._options import JsonOption


def tasks(as_json: JsonOption = False) -> None:
    """The tasks that can be named in a configuration; NAME@FITNESS is NAME under another fitness (demo-span@kl)."""
    found = moevolve.tasks()
    if as_json:
        print_json(found)
        return
    rows = [[task.name, task.fitness, ", ".join(task.splits), task.description] for task in found]
    print_table(None, [("task", False), ("fitness", False), ("splits", False), ("description", False)], rows)
