"""Tiny models of every family, from the table in `families.yaml`, and edits for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.families.registry import register_class
from moevolve.workers.methods.eep.edit import EepEdit

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COMMON: dict[str, Any] = _TABLE["common"]
DENSE: dict[str, dict[str, Any]] = _TABLE["dense"]
WRAPPERS: dict[str, dict[str, Any]] = _TABLE["wrappers"]
DENSE_WRAPPERS: dict[str, dict[str, Any]] = _TABLE["dense_wrappers"]


@dataclass(frozen=True)
class Variant:
    """A row of the table, which explains the attributes."""

    settings: Mapping[str, Any]
    moe_layers: tuple[int, ...] = (0, 1, 2)
    experts: int = 6
    expert_parameters: int = 3 * 24 * 32
    router_parameters: int = 32
    folds: bool = True
    unrepairable: bool = False
    like: str | None = None
    shows: Mapping[str, str | None] | None = None
    also: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.moe_layers)


VARIANTS: dict[str, Variant] = {
    name: Variant(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
    for name, row in _TABLE["families"].items()
}


def representatives(first: Iterable[str], all_of: Iterable[str]) -> list[Any]:
    """Families or formats in the order of their names, those that aren't among the first marked `family_matrix`."""
    chosen = sorted(first)
    others = [pytest.param(each, marks=pytest.mark.family_matrix) for each in sorted(all_of) if each not in chosen]
    return [*chosen, *others]


def showing(test: str) -> tuple[str, ...]:
    """The variants that are the examples of something in a test."""
    return tuple(name for name, one in VARIANTS.items() if test in (one.shows or {}))


def examples(test: str) -> list[Any]:
    """Return the variants of a test; all but the examples are marked `family_matrix`."""
    return representatives(showing(test), [name for name, one in VARIANTS.items() if test in one.also])


def random_model(variant: str, seed: int, randomised: bool = True, **settings: Any) -> Any:
    """A random model in float32; `settings` of the config replace those of the table.

    Args:
        variant: Of a family in the table.
        seed: Seed of the random weights.
        randomised: Whether what starts at zero, or is tiny, gets other values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    own = DENSE[variant] if variant in DENSE else VARIANTS[variant].settings
    config = AutoConfig.for_model(variant.split("-", maxsplit=1)[0], **{**COMMON, **own, **settings})
    register_class(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for name, tensor in model.state_dict().items() if randomised else ():
            randomise(name, tensor)
            if variant in DENSE and name.endswith(".bias"):
                nn.init.normal_(tensor, std=0.2)
            elif variant in DENSE and name.endswith("feedforward_layernorm.weight"):
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


def randomise(name: str, tensor: Tensor) -> None:
    """Give what starts at zero or is tiny in these families a part to play."""
    if name.endswith(("per_expert_scale", ".router.scale")):
        nn.init.normal_(tensor, mean=1.0, std=0.25)
    elif name.endswith((".gate.weight", ".router.weight", ".wg.weight", ".router.proj.weight")):
        nn.init.normal_(tensor, std=0.4)
    elif name.endswith(("e_score_correction_bias", "expert_bias", "router.bias", "proj_bias", ".sinks")):
        nn.init.normal_(tensor, std=0.25)
    elif name.endswith("tid2eid"):
        tensor.copy_(torch.stack([torch.randperm(6)[: tensor.shape[1]] for _ in tensor]))


def sample_rows(seed: int = 0, lengths: tuple[int, ...] = (9, 14, 11, 9, 20)) -> FitRows:
    """Random token sequences of the small vocabulary."""
    tokens = np.random.default_rng(seed).integers(3, 97, sum(lengths), dtype=np.int32)
    return FitRows(tokens, np.array(lengths, dtype=np.int32), np.array(lengths, dtype=np.int32))


def one_hot(layers: int, retained: int, experts: int, rng: np.random.Generator) -> NDArray[np.float32]:
    return np.eye(experts, dtype=np.float32)[np.stack([rng.permutation(experts)[:retained] for _ in range(layers)])]


def edit_of_kind(
    layers: int, experts: int, kind: str, retained: int = 4, active: int = 2, space: str = "probs", seed: int = 0
) -> EepEdit:
    """Edits by kind: `prune`, `crossed` (two different one-hot matrices), `mapped`, `merged`, `both`, `mixed`."""
    rng = np.random.default_rng(seed)
    mapping = one_hot(layers, retained, experts, rng)
    merging = one_hot(layers, retained, experts, rng) if kind == "crossed" else mapping.copy()
    noise = rng.normal(0, 0.15, (2, *mapping.shape)).astype(np.float32)
    if kind in ("mapped", "both", "mixed"):
        mapping = mapping + noise[0]
    if kind in ("merged", "both", "mixed"):
        merging = merging + noise[1] * (rng.random(merging.shape) < 0.6)
    if kind == "mixed":
        mapping[0] = merging[0] = one_hot(1, retained, experts, rng)[0]
        merging[-1] = one_hot(1, retained, experts, rng)[0]
    return EepEdit(mapping, merging, active, space)  # type: ignore[arg-type]


def family_edit(
    variant: str, kind: str, retained: int = 4, active: int = 2, space: str = "probs", seed: int = 0
) -> EepEdit:
    """An edit of a family's model; see `edit_of_kind`."""
    row = VARIANTS[variant]
    return edit_of_kind(row.layers, row.experts, kind, retained, active, space, seed)
