"""Edits, repairs and the engine on a GPU against the same on the CPU, on tiny models in float32.

Without a GPU they run on the lab's second device, which finds tensors of two devices in one operator, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from dense_edits import divided, head_masks, masked
from edit_checks import Residents, assert_close, logits
from engine_samples import Numbers, answers, edit_of_family, others, words_split
from families import representatives
from repair_samples import rows_of, sequences_of
from second_device import second_device
from torch import Tensor

from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

pytestmark = pytest.mark.gpu

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3-grouped", "gpt_oss")
FORMS = ("mixtral", "gpt_oss")
"""Families whose experts are stored in different forms."""
ROWS = rows_of(sequences_of([21] * 12))


def gpu() -> AbstractContextManager[Any]:
    return nullcontext() if torch.cuda.is_available() else second_device()


def check(here: ResidentModel, config: ModelConfig, edits: list[Edit], tokens: Tensor, tolerance: float = 1e-4) -> None:
    edits.append(IdentityEdit())
    expected = [logits(here, edit, tokens) for edit in edits]
    with gpu():
        there = ResidentModel.load(replace(config, device="cuda"))
        found = [logits(there, edit, tokens.to("cuda")).cpu() for edit in edits]
    for pair in zip(found, expected, strict=True):
        assert_close(*pair, tolerance)


def test_what_is_left_on_the_host_is_found() -> None:
    here = torch.ones(2, 2)
    with gpu(), pytest.raises(RuntimeError, match="same device"):
        torch.mm(here.to("cuda"), here)


@pytest.mark.parametrize("expert_offload", ["device", "host", "disk"])
@pytest.mark.parametrize("family", representatives(FORMS, FAMILIES))
def test_edits_of_experts(
    family: str,
    expert_offload: str,
    resident: Residents,
    model_config: Callable[..., ModelConfig],
    tokens: Tensor,
) -> None:
    edits: list[Edit] = [edit_of_family(family, kind) for kind in ("prune", "both", "mixed", "prune")]
    check(resident(family), model_config(family, expert_offload=expert_offload), edits, tokens)


@pytest.mark.parametrize("expert_offload", ["device", "host"])
@pytest.mark.parametrize("family", FORMS)
def test_repairs_of_experts(
    family: str,
    expert_offload: str,
    resident: Residents,
    model_config: Callable[..., ModelConfig],
    tokens: Tensor,
) -> None:
    settings = RepairSettings(tokens=256, ridge_lambdas=(0.1,))
    edit = RepairedEdit(edit_of_family(family, "prune"), settings, ROWS)
    check(resident(family), model_config(family, expert_offload=expert_offload), [edit], tokens, 1e-3)


def test_edits_of_dense_models(resident: Residents, model_config: Callable[..., ModelConfig], tokens: Tensor) -> None:
    here = resident("llama")
    names = tuple(name for name in find_linears(here.model) if name.endswith("up_proj"))
    form = BlockForm("III", 4, 3)
    steps = np.random.default_rng(0).normal(0, 0.3, (len(names), *form.mixing_shape))
    mixed = NanoMoeEdit(form, names, (form.unmixed + steps).astype(np.float32))
    edits: list[Any] = [divided(), masked(heads=head_masks()), mixed]
    settings = RepairSettings(tokens=256, ridge_lambdas=(0.1,))
    edits += [RepairedEdit(masked((20, 7, 33)), settings, ROWS)]
    check(here, model_config("llama"), edits, tokens, 1e-3)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_the_engine(
    family: str, tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    split = words_split((3, 17, 9), 12, (2, 5), ("w7 w8", "w9"), 3)
    model, copy = tiny_model(family), tiny_model(family)
    texts, scores, *expected = numbers(model, tiny_tokenizer, split)
    with gpu():
        found_texts, found_scores, *found = numbers(torch.nn.Module.to(copy, "cuda"), tiny_tokenizer, split)
    assert found_texts == texts
    np.testing.assert_allclose(found_scores, scores, atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        for values, true in zip(one, other, strict=True):
            np.testing.assert_allclose(values, true, atol=1e-3)


def numbers(model: Any, tokenizer: PreTrainedTokenizerFast, split: PreparedSplit) -> Numbers:
    """Several prompts are one batch, but not all of them."""
    engine = GenerationEngine(model, tokenizer, EngineConfig(batch_tokens=40))
    engine.remember(split)
    return [*answers(engine, split), *others(engine, split)]
