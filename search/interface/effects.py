"""What moved the score in a search."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated

from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.results.effects import Effects, effects
from moevolve.store.reader import StoreReader


@record
class EffectsRequest(Request):
    """Estimate what moved the score in a search: operators, layers, experts and settings, with 95 % intervals.

    Scores are explained by a sum over what genomes choose, fitted by Bayesian linear regression. Nothing is evaluated.

    Raises:
        StoreError: there is no such store or search.
        UserError: the search was stored without the facts of its model.
    """

    route = "/searches/{search}/effects"
    search: SearchRef
    _: KW_ONLY
    limit: Annotated[int, about("List at most this many options, the surest ones first.", ge=1, le=1000)] = 20
    genes: Annotated[
        bool, about("List the varying settings and sizes of each individual, too, for a chart."), Flag("--genes")
    ] = False

    def answer(self, store: StoreReader) -> Effects:
        return effects(store, self.search, self.limit, self.genes)
