"""Results of a prompt don't depend on the rest of the pass, even with a library whose products do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from dense_edits import divided, head_masks, masked
from edit_checks import Residents
from engine_samples import answers, edit_of_family, others, ranks, words_split
from fickle_library import FickleLibrary

from moevolve.evaluators.types import PreparedSplit
from moevolve.kernels import products as kernel
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import EngineConfig, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WAYS = ((Shortcuts(), 4096), (Shortcuts(draft=False, prefixes=False), 20))
"""Shortcuts, and tokens of a batch: every prompt with the others, or by itself."""


def split_of() -> PreparedSplit:
    """Prompts of 18 to 26 tokens, two of which share a prefix; answers and choices of 1 to 3 tokens."""
    return words_split((26,), 15, (1, 3), ("w30", "w36 w7 w8"), 3)


class Asked:
    """A resident model whose splits are run in all ways."""

    def __init__(self, resident: ResidentModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.resident, self.tokenizer = resident, tokenizer
        resident.model.generation_config.eos_token_id = [2]

    def in_all_ways(self, *edits: Edit, library: Any = None, texts: bool = False) -> list[list[Any]]:
        """Results of every edit, by way: answers and ranks, and those of whole texts, which take the same passes."""
        found = []
        for shortcuts, batch_tokens in WAYS:
            config = EngineConfig(batch_tokens=batch_tokens)
            engine = GenerationEngine(self.resident.model, self.tokenizer, config, shortcuts)
            with library or nullcontext():
                if texts:
                    engine.remember(split_of())
                numbers = []
                for edit in edits:
                    with self.resident.edited(edit):
                        more = others if texts else ranks
                        numbers.append([*answers(engine, split_of()), *more(engine, split_of())])
            found.append(numbers)
        return found


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FickleLibrary]:
    monkeypatch.setattr(kernel, "ONEDNN_LEAST", 1)
    fickle = FickleLibrary()
    yield fickle
    assert fickle.asked > 300


def assert_one(found: list[list[Any]]) -> None:
    for other in found[1:]:
        assert other == found[0]


MODELS: dict[str, dict[str, str]] = {
    "mixtral": {},
    "mixtral-window": {"dtype": "bfloat16"},
    "qwen2_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
}
"""Experts, routers and attention in each of the ways in which their products are replaced."""


@pytest.mark.parametrize("name", MODELS)
def test_experts(
    name: str,
    library: FickleLibrary,
    resident: Residents,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = name.split("-", maxsplit=1)[0]
    onednn = name == "qwen2_moe" and kernel.onednn_available()
    monkeypatch.setattr(kernel, "onednn_preferred", lambda: onednn)
    model = resident(family, **MODELS[name])
    if name == "mixtral-window":
        model.model.config.sliding_window = 6
    try:
        asked = Asked(model, tiny_tokenizer)
        # What a family computes by itself needs to be asked in its usual form only.
        own = [IdentityEdit()] if name == family else []
        edits = (*own, edit_of_family(family, "mixed"))
        assert_one(asked.in_all_ways(*edits, library=library, texts=name == "mixtral"))
    finally:
        if name == "mixtral-window":
            model.model.config.sliding_window = None


@pytest.mark.parametrize(
    ("family", "asked"), [("llama", (0, 2, 5)), ("opt", (0, 1)), ("phi", (3, 4))], ids=["llama", "opt", "phi"]
)
def test_dense_models(
    family: str,
    asked: Sequence[int],
    library: FickleLibrary,
    resident: Residents,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = resident(family)
    # The masks are applied as copies of an expert's neurons, and as masks.
    edits: list[Edit] = [divided(), IdentityEdit(), masked((24, 24, 24)), masked((42, 42, 42))]
    names = tuple(name for name in find_linears(model.model) if ".layers.0." in name or ".layers.2." in name)[:4]
    for variant in ("II", "III"):
        form = BlockForm(variant, 4, 6)
        steps = np.random.default_rng(0).normal(0, 0.3, (len(names), *form.mixing_shape))
        edits.append(NanoMoeEdit(form, names, (form.unmixed + steps).astype(np.float32)))
    chosen = [edits[each] for each in asked]
    assert_one(Asked(model, tiny_tokenizer).in_all_ways(*chosen, library=library))


def test_heads_that_are_masked(
    library: FickleLibrary, resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = resident("llama")
    edit = masked((24, 24, 24), head_masks())
    assert_one(Asked(model, tiny_tokenizer).in_all_ways(edit, library=library))


def test_without_tiles_results_differ(
    library: FickleLibrary,
    resident: Residents,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without tiles every way gives other results with this library."""
    monkeypatch.setattr(kernel, "linear", lambda x, weight, bias=None, **_: torch.nn.functional.linear(x, weight, bias))
    asked = Asked(resident("mixtral"), tiny_tokenizer)
    logprobs = {tuple(way[0][1]) for way in asked.in_all_ways(IdentityEdit(), library=library)}
    assert len(logprobs) == len(WAYS)
