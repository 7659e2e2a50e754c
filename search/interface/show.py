"""What is stored of one individual: everything, its genome in columns, its lineage."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from moevolve.evaluators.records import short_repr
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.registry import outline_of
from moevolve.search.interface.parameters import IndividualRef
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.running.candidates import find_candidate
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualDetail, LineageGraph


@record
class ShowRequest(Request):
    """Show everything that the store has on one individual.

    Raises:
        StoreError: there is no such store or individual.
    """

    route = "/individuals/{individual}"
    individual: IndividualRef

    def answer(self, store: StoreReader) -> IndividualDetail:
        return store.individual(self.individual)


@dataclass(frozen=True, slots=True)
class GenomeView:
    """A genome in columns, beside another one if that was asked for.

    Attributes:
        ref, against: The individuals as SEARCH:INDEX.
        outline, other: What they keep, and their settings.
    """

    __repr__ = short_repr

    ref: str
    outline: GenomeOutline
    against: str | None = None
    other: GenomeOutline | None = None


@record
class GenomeRequest(Request):
    """Show an individual's genome in columns: what it keeps of each layer, and its settings.

    Raises:
        StoreError: there is no such store or individual.
        UserError: the search was stored without the facts of its model.
    """

    route = "/individuals/{individual}/genome"
    individual: IndividualRef
    _: KW_ONLY
    against: Annotated[
        str | None,
        about("Show the differences from this individual, too.", max_length=LONGEST_NAME + 20),
        Flag(metavar="INDIVIDUAL"),
    ] = None

    def answer(self, store: StoreReader) -> GenomeView:
        ref = store.individual(self.individual).ref
        if self.against is None:
            return GenomeView(ref, _outline(store, ref))
        against = store.individual(self.against).ref
        return GenomeView(ref, _outline(store, ref), against, _outline(store, against))


def _outline(store: StoreReader, ref: str) -> GenomeOutline:
    found = find_candidate(store, ref, weights=False).genome
    assert found is not None
    return outline_of(found)


@record
class LineageRequest(Request):
    """Show the ancestors of an individual, back to those without parents.

    Raises:
        StoreError: there is no such store or individual.
    """

    route = "/individuals/{individual}/lineage"
    individual: IndividualRef
    _: KW_ONLY
    descendants: Annotated[bool, about("Follow children instead of ancestors.")] = False
    depth: Annotated[int | None, about("Follow at most this many generations.", ge=0, le=10_000)] = None

    def answer(self, store: StoreReader) -> LineageGraph:
        follow = store.descendants if self.descendants else store.ancestors
        return follow(self.individual, self.depth)
