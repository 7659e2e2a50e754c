"""Frozen values that the store answers questions with: rankings of configurations, and lineages."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.store.records import IndividualStatus, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRow:
    """One configuration in a ranking for one task.

    Attributes:
        task: the task it is ranked for.
        ranked_by: the split whose score ranks this row.
        search_score, dev_score, test_score: of this phenotype on the task's splits; None where not evaluated.
        index: of the earliest individual that has this phenotype.
        genome_kind: of the search.
    """

    task: str
    ranked_by: Split
    search_id: str
    search_name: str
    index: int
    genome_kind: str
    search_score: float | None
    dev_score: float | None
    test_score: float | None
    gold_logprob: float
    experts: int
    active: int
    parameters: int
    active_parameters: int
    parameters_full: int
    summary: str
    depth: int
    phase: str
    operator: str
    phenotype_hash: str
    model_fingerprint: str

    @property
    def ref(self) -> str:
        """`name:index`, as the command line takes it."""
        return f"{self.search_name}:{self.index}"

    @property
    def score(self) -> float:
        """The score that ranks this row, on the split `ranked_by`."""
        scores = {"search": self.search_score, "dev": self.dev_score, "test": self.test_score}
        score = scores[self.ranked_by]
        assert score is not None
        return score


@dataclass(frozen=True, slots=True)
class LineageNode:
    """One individual of a lineage graph."""

    index: int
    depth: int
    phase: str
    operator: str
    status: IndividualStatus
    fitness: float | None
    summary: str


@dataclass(frozen=True, slots=True)
class LineageGraph:
    """Ancestors or descendants of one individual, itself included.

    Attributes:
        root: index of the individual asked for.
        nodes: by index, ascending.
        edges: (parent, child) pairs of indices, both among the nodes, ascending.
    """

    search_id: str
    search_name: str
    root: int
    nodes: tuple[LineageNode, ...]
    edges: tuple[tuple[int, int], ...]
