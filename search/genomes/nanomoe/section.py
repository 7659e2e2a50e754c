"""The `genome` section of NanoMoE searches."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from moevolve.search.genomes.contract.base import GenomeSection


class NanoMoeSection(GenomeSection):
    """The NanoMoE genome: chosen linear layers as blockdiag(U) M blockdiag(V), M searched.

    Attributes:
        variant: form of the mixing matrix's blocks: `I` scalars, `II` diagonals, `III` diagonals plus rank one;
            `low_rank` is plain U V, a baseline with nothing to search.
        blocks: K blocks of inputs and of outputs; it divides both. `low_rank` has none.
        rank: r, columns of every block of U and rows of every block of V.
        layers: which linear layers: a shell pattern on names such as `layers.0.mlp.up_proj`.
        fit: rounds of least squares that fit U, V and M together to a layer's weight before the search, whose start
            that is then; 0 starts at plain low rank, where M's blocks are all the identity.
        start: what these rounds begin with: the truncated singular value decomposition (`svd`), near which variant I's
            fit stays, or Gaussian factors and mixing (`random`), as a training does. On the demo's layers `random`
            ends with larger errors (`tests/benchmarks/README.md`).
        start_seed: of the `random` start.
        refine: rounds of alternating least squares on U and V, given a candidate's M: they bring a layer back to its
            weight, whatever M is, and so undo much of what the search finds. On the dense demo model 60 evaluations
            gained 0.006 with one round and 0.037 with none, in exp(-KL).
        fit_to: what layers are fitted to: their `weights`, or their `outputs` on the tasks' calibration rows (SVD-LLM).
        calibration_tokens: tokens of the `calibration` rows that `outputs` are measured on.
    """

    random_title: ClassVar[str] = "random mixing"
    parts: ClassVar[str] = "blocks"
    counted: ClassVar[str] = "{experts} of inputs and of outputs per layer"
    kind: Literal["nanomoe"]
    variant: Literal["I", "II", "III", "low_rank"] = "I"
    blocks: int = Field(4, ge=1, le=1024)
    rank: int = Field(ge=1, le=65535)
    layers: str = "*.mlp.*"
    fit: int = Field(0, ge=0)
    start: Literal["svd", "random"] = "svd"
    start_seed: int = Field(0, ge=0)
    refine: int = Field(0, ge=0)
    fit_to: Literal["weights", "outputs"] = "weights"
    calibration_tokens: int = Field(8192, ge=1)

    @model_validator(mode="after")
    def _random_start_is_fitted(self) -> Self:
        if self.start == "random" and not (self.fit and self.variant != "low_rank"):
            raise ValueError(
                "start: random needs a variant with mixing and fit: 1 at least, or nothing is like the weight"
            )
        return self
