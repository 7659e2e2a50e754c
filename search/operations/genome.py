"""Genomes in columns. Apart from `queries.py`, because it reads the config of the search's model."""

from __future__ import annotations

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.registry import outline_of
from moevolve.search.operations.subject import find_subject
from moevolve.search.requests.answers import GenomeView
from moevolve.search.requests.searches import GenomeRequest
from moevolve.store.reader import StoreReader


def genome(store: StoreReader, request: GenomeRequest) -> GenomeView:
    """See `GenomeRequest`."""
    ref = store.individual(request.individual).ref
    if request.against is None:
        return GenomeView(ref, _outline(store, ref))
    against = store.individual(request.against).ref
    return GenomeView(ref, _outline(store, ref), against, _outline(store, against))


def _outline(store: StoreReader, ref: str) -> GenomeOutline:
    try:
        found = find_subject(store, ref, weights=False).genome
    except OSError as error:
        raise UserError(f"{ref}: its model's config can't be read: {' '.join(str(error).split())}") from None
    assert found is not None
    return outline_of(found)
