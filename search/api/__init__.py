"""moevolve makes mixture-of-experts language models smaller and faster for your tasks, using inference only.

Every command is a function of the same name here (`plan` is `estimate`, and `show` of a search is `overview`), and
returns what the command prints:

    import moevolve

    run = moevolve.launch("configs/runs/demo.yaml", store="sqlite:///demo.db")
    run.winner, run.best.scores

    run = moevolve.final_table("sqlite:///demo.db", "demo")  # the same later, from the store
    with moevolve.open_store("sqlite:///demo.db") as store:
        top = moevolve.best(store, task="demo-calendar", experts=4)
    moevolve.export("demo:1", "./smaller", store="sqlite:///demo.db")

What they have in common:

* A **configuration** is the path of a YAML file, or what `load_config` read from it. `overrides` change its settings:
  `{"genome.experts": 4}`, or `["genome.experts=4"]` as on the command line.
* A **store** is a URL (`sqlite:///demo.db`, `postgresql://user@host/name`), or an open store, which is left open.
  Functions that only read also take one that `open_reader` opened.
* An **individual** is called `SEARCH:INDEX`; where it says so, `full` is the unedited model.
* **Whole stores** are maintained by `moevolve.db`, as by `moevolve db ...`.
* **Records** are frozen values; `as_data` turns any of them into plain JSON data. Their scores are in [0, 1].
  `pandas.json_normalize(as_data(best(...)))` makes a data frame.
* **Progress** of functions that take more than a moment is shown on stderr. `progress=False` turns it off, and an
  `observer` gets it instead.
* **Errors** that you can correct are a `UserError` or a `StoreError` of one line. `PoolError` is raised for workers,
  `ExportError` for checkpoints that fail their verification, `ProfileError` for profiled models. Interrupting a
  function that searches leaves the search resumable.

Importing it is quick: torch, Ray and transformers are loaded by the functions that need them.
"""

from __future__ import annotations

import os
from pathlib import Path

import lazy_loader

if __name__ != "moevolve":
    raise ImportError("search/api is the package `moevolve` itself: import that")
if Path(__file__).parent.name == "api":
    # An editable install: its import hook knows folders with an `__init__.py`, and `kernels` must not have one.
    __path__.append(str(Path(__file__).parents[2]))

# Threads of torch wait for each other by spinning, which beside other programs takes up to hundreds of times as long as
# the work: they are to sleep after microseconds. OpenMP reads it when torch is imported, here or in a child process.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The names are in `__init__.pyi`, with their modules, which are imported when a name is asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
