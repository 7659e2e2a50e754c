"""What Ray runs before each worker, to give it its environment, without importing Ray for that.

Ray's own program does the same (`ray/_private/workers/setup_worker.py`), and the import is half of what a worker's
start takes. Clusters of the tests name this one instead; those that `ray start` or a search starts have Ray's own.
"""

from __future__ import annotations

import json
import os
import shlex
import sys

_CONTEXT = "--serialized-runtime-env-context="


def main(arguments: list[str]) -> None:
    """Become the worker: `arguments` are its program and options, and the environment as JSON."""
    (told,) = (each.removeprefix(_CONTEXT) for each in arguments if each.startswith(_CONTEXT))
    context = json.loads(told)
    passed = [each for each in arguments if not each.startswith((_CONTEXT, "--language="))]
    assert context["override_worker_entrypoint"] is None, "no test has its workers in containers"
    os.environ.update(context["env_vars"])
    command = [*context["command_prefix"], "exec", context["py_executable"], *map(shlex.quote, passed)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


if __name__ == "__main__":
    main(sys.argv[1:])
