"""What an engine says of a prompt doesn't hang on what else is in the pass, on a library whose products do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from edit_checks import Residents
from family_samples import SETTINGS as MORE_SETTINGS
from family_samples import make_family_edit
from fickle_library import FickleLibrary

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.kernels import products as kernel
from moevolve.workers.config import EngineConfig, Products, Shortcuts
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.base import Edit, IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Edits = Callable[..., EepEdit]
ALL, NONE = Shortcuts(), Shortcuts(draft=False, lean=False, prefixes=False)
WAYS = ((ALL, 4096), (NONE, 90), (ALL, 1))
"""Shortcuts, and tokens of a batch: every prompt with the others or by itself."""


def split_of() -> PreparedSplit:
    """Prompts of 2 to 40 tokens, three of which begin alike; answers and choices of 1 to 4."""
    rng = np.random.default_rng(5)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(4, 60, size=count))

    common = words(17)
    prompts = [*(words(int(count)) for count in (2, 9, 15, 16, 33, 40)), *(f"{common} {words(n)}" for n in (1, 3, 20))]
    choices = ("w30", "w31 w32", "w36 w7 w8 w9")
    examples = tuple(Example(prompt, (words(1 + i % 4),), choices) for i, prompt in enumerate(prompts))
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), 4, " ", examples)


def numbers_of(engine: GenerationEngine) -> list[Any]:
    """Everything that an engine can be asked, with the numbers as they are."""
    split = split_of()
    made = engine.generate(split, lambda i, _: i % 3 == 0)
    ranks = [each.tolist() for each in engine.rank(split)]
    texts = [engine.text_logprobs(split), engine.divergences(split), engine.agreements(split)]
    return [made.texts, made.gold_logprobs.tolist(), ranks, *(each.tolist() for each in texts)]


class Asked:
    """A resident model that is asked in all ways."""

    def __init__(self, resident: ResidentModel, tokenizer: PreTrainedTokenizerFast, products: Products) -> None:
        self.resident, self.tokenizer, self.products = resident, tokenizer, products
        resident.model.generation_config.eos_token_id = [2]

    def in_all_ways(self, *edits: Edit, library: Any = None) -> list[list[Any]]:
        """Per way, the numbers of every edit."""
        found = []
        for shortcuts, batch_tokens in WAYS:
            config = EngineConfig(batch_tokens=batch_tokens, products=self.products)
            engine = GenerationEngine(self.resident.model, self.tokenizer, config, shortcuts)
            with library or nullcontext():
                engine.remember(split_of())
                numbers = []
                for edit in edits:
                    with self.resident.edited(edit):
                        numbers.append(numbers_of(engine))
            found.append(numbers)
        return found


@pytest.fixture
def library() -> Iterator[FickleLibrary]:
    fickle = FickleLibrary()
    yield fickle
    assert fickle.asked > 1000


@pytest.fixture
def family_edit(make_edit: Edits) -> Callable[[str], EepEdit]:
    """Layers with one-hot matrices and merging ones, of any family."""

    def make(family: str) -> EepEdit:
        settings: dict[str, Any] = {"space": "logits" if family == "gpt_oss" else "probs"}
        return (make_family_edit if family in MORE_SETTINGS else make_edit)(family, "mixed", **settings)

    return make


def assert_one(found: list[list[Any]]) -> None:
    for other in found[1:]:
        assert other == found[0]


MODELS: dict[str, dict[str, str]] = {
    "mixtral": {},
    "mixtral-window": {},
    "mixtral-eager": {"attn_implementation": "eager", "experts_implementation": "eager"},
    "mixtral-bfloat16": {"dtype": "bfloat16"},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "gpt_oss-eager": {"experts_implementation": "eager"},
    "gpt_oss-batched": {"experts_implementation": "batched_mm"},
}
CASES: list[tuple[str, Products]] = [
    *((name, "torch") for name in MODELS),
    ("mixtral", "onednn"),
    ("qwen2_moe", "onednn"),
]


@pytest.mark.parametrize(("name", "products"), CASES)
def test_experts(
    name: str,
    products: Products,
    library: FickleLibrary,
    resident: Residents,
    tiny_tokenizer: PreTrainedTokenizerFast,
    family_edit: Callable[[str], EepEdit],
) -> None:
    family = name.split("-", maxsplit=1)[0]
    if products == "onednn" and not kernel.onednn_available():
        pytest.skip("this build of torch has no oneDNN")
    model = resident(family, **MODELS[name])
    if name == "mixtral-window":
        model.model.config.sliding_window = 6
    try:
        asked = Asked(model, tiny_tokenizer, products)
        assert_one(asked.in_all_ways(IdentityEdit(), family_edit(family), library=library))
    finally:
        if name == "mixtral-window":
            model.model.config.sliding_window = None


@pytest.mark.parametrize("family", ["llama", "opt", "phi"])
def test_dense_models(
    family: str,
    library: FickleLibrary,
    resident: Residents,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = resident(family)
    layers, width = len(model.dense_layers), model.dense_layers[0].width
    rng = np.random.default_rng(2)
    order = np.stack([np.arange(width)] * layers)
    edits: list[Edit] = [
        FactorLlmEdit(order, rng.normal(size=(layers, 1, 4, 32)), rng.normal(size=(layers, 1, 4)), 2),
        IdentityEdit(),
    ]
    for share in (2, 8):  # by copies of an expert's neurons, and by masks
        kept = rng.permuted(np.tile(np.arange(width) < width - width // share, (layers, 4, 1)), axis=2)
        edits.append(ToMoeEdit(kept, rng.normal(size=(layers, 4, 5)), rng.normal(size=(layers, 5, 32)), None))
    names = tuple(name for name in find_linears(model.model) if ".layers.0." in name or ".layers.2." in name)[:4]
    for variant in ("I", "II", "III"):
        form = BlockForm(variant, 4, 6)
        steps = np.random.default_rng(0).normal(0, 0.3, (len(names), *form.mixing_shape))
        edits.append(NanoMoeEdit(form, names, (form.unmixed + steps).astype(np.float32)))
    assert_one(Asked(model, tiny_tokenizer, "torch").in_all_ways(*edits, library=library))


def test_heads_that_are_masked(
    library: FickleLibrary, resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = resident("llama")
    rng, width = np.random.default_rng(2), model.dense_layers[0].width
    heads = HeadMasks(
        np.array([[True, True, False, True]] * 3),
        np.array([5, 3, 4]),
        rng.normal(size=(3, 8)),
        rng.normal(size=(3, 8, 2)),
        rng.normal(size=(3, 2, 32)),
    )
    kept = rng.permuted(np.tile(np.arange(width) < width // 2, (3, 4, 1)), axis=2)
    edit = ToMoeEdit(kept, rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 5, 32)), heads)
    assert_one(Asked(model, tiny_tokenizer, "auto").in_all_ways(edit, library=library))


def test_the_library_is_fickle(
    library: FickleLibrary,
    resident: Residents,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of as many rows as there are come out otherwise in every way."""
    monkeypatch.setattr(kernel, "linear", lambda x, weight, bias=None, **_: torch.nn.functional.linear(x, weight, bias))
    asked = Asked(resident("mixtral"), tiny_tokenizer, "torch")
    logprobs = {tuple(way[0][1]) for way in asked.in_all_ways(IdentityEdit(), library=library)}
    assert len(logprobs) == len(WAYS)
