"""What an individual keeps of each layer, alone or beside another one."""

from __future__ import annotations

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
    found = find_subject(store, ref, weights=False).genome
    assert found is not None
    return outline_of(found)
