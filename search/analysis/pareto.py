"""Scores of candidates against their sizes, and of models that weren't searched."""

from __future__ import annotations

from functools import cache

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.genomes.registry import KINDS
from moevolve.search.requests.answers import Pareto
from moevolve.search.requests.searches import ParetoRequest
from moevolve.search.settings.phases import START
from moevolve.store.pareto import Size
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.facts import DTYPE_BYTES


def pareto(store: StoreReader, request: ParetoRequest) -> Pareto:
    """See `ParetoRequest`."""
    size: Size = "active_parameters" if request.size == "flops" else "parameters"
    where = request.task, request.split, request.search
    front = tuple(store.pareto(*where, size))
    return Pareto(
        request.task,
        request.split,
        request.size,
        {"parameters": 1.0, "flops": 2.0}.get(request.size) or _bytes_each(store, request),
        front,
        tuple(store.marks(*where, _unsearched())),
        tuple(store.candidate_cells(*where, size)) if request.candidates else (),
    )


@cache
def _unsearched() -> frozenset[str]:
    """Operators of individuals that weren't searched: random ones, starts and one-shot methods."""
    return frozenset({"random", START, *(name for kind in KINDS.values() for name in kind.baselines)})


def _bytes_each(store: StoreReader, request: ParetoRequest) -> float:
    """Bytes of a parameter.

    Raises:
        UserError: the dtype isn't in the configuration of the search.
    """
    if request.search is None:
        named = [one.search for one in store.searches() if request.task in one.tasks]
    else:
        named = [store.search(request.search)]
    found = DTYPE_BYTES.get(parse_stored_config(named[-1].config).model.parameter_dtype) if named else None
    if found is None:
        raise UserError(f"{request.task}: the dtype of the weights isn't known, so their bytes aren't either")
    return float(found)
