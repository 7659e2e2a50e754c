"""Edits on Mixtral, Qwen2-MoE, DeepSeek-V2 and -V3, GLM-4-MoE and GPT-OSS against their equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_checks import Residents, assert_close, logits
from family_samples import SAMPLES, make_family_edit, representatives
from plain_families import plain_family_logits, stock_family_logits
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig

Checkpoints = Callable[[str], Path]
Configs = Callable[..., ModelConfig]

KINDS = ("crossed", "mixed")
TWO = pytest.mark.parametrize("variant", ["deepseek_v3-grouped", "gpt_oss"])
"""Sigmoids in groups with a bias, and a softmax of the chosen with biased, transposed experts."""
OWN_RULES = ("mixtral", "qwen2_moe", "deepseek_v2-grouped", "deepseek_v3-grouped", "deepseek_v3-unscaled", "gpt_oss")
"""Variants whose routers differ in what a rule says; the others are like those that have groups, without them."""
CONTINUOUS = ("mapped", "both", "mixed")


def spaces(variant: str, kind: str) -> tuple[str, ...]:
    return ("logits",) if variant == "gpt_oss" and kind in CONTINUOUS else ("probs", "logits")


@pytest.mark.parametrize("variant", representatives(OWN_RULES, SAMPLES))
@pytest.mark.parametrize("kind", KINDS)
def test_edited_logits_are_those_of_the_equations(
    variant: str, kind: str, resident: Residents, checkpoint: Checkpoints, tokens: Tensor
) -> None:
    found, tokens = [], tokens[:1, :7]
    for space in spaces(variant, kind):
        edit = make_family_edit(variant, kind, space=space)
        found.append(logits(resident(variant), edit, tokens))
        assert_close(found[-1], plain_family_logits(checkpoint(variant), edit, tokens))
    if len(found) == 2:
        same = SAMPLES[variant].folds and kind not in CONTINUOUS
        assert torch.equal(*found) if same else float((found[0] - found[1]).abs().max()) > 1e-3
    stock = stock_family_logits(checkpoint(variant), tokens)
    assert torch.equal(logits(resident(variant), IdentityEdit(), tokens), stock)


@pytest.mark.parametrize("variant", ["mixtral", "deepseek_v2-grouped", "deepseek_v3-grouped", "gpt_oss"])
def test_numbers_retained_and_active(
    variant: str, resident: Residents, checkpoint: Checkpoints, tokens: Tensor
) -> None:
    model, count, tokens = resident(variant), SAMPLES[variant].experts, tokens[:1, :7]
    groups = model.layers[0].rule.groups
    tried = 0
    for retained in range(1, count + 1):
        for active in {1, 2, retained}:
            if groups.fault(retained) or active > groups.reach(retained):
                continue
            edit = make_family_edit(variant, "both", retained, active, space="logits", seed=retained)
            assert_close(logits(model, edit, tokens), plain_family_logits(checkpoint(variant), edit, tokens))
            tried += 1
    assert tried >= 4
    even = make_family_edit(variant, "both", count, 2, space="logits")
    edit = replace(even, active=(2, 1, 3)[: even.layers])
    found = logits(model, edit, tokens)
    assert_close(found, plain_family_logits(checkpoint(variant), edit, tokens))
    assert float((found - logits(model, even, tokens)).abs().max()) > 1e-3


def test_host_originals_give_the_same_logits(resident: Residents, tokens: Tensor) -> None:
    host, device = resident("gpt_oss", expert_offload="host"), resident("gpt_oss")
    for kind in ("prune", "both"):
        edit = make_family_edit("gpt_oss", kind, space="logits")
        assert_close(logits(host, edit, tokens), logits(device, edit, tokens))


@TWO
def test_sixteen_bit_models_keep_their_dtype(variant: str, resident: Residents, tokens: Tensor) -> None:
    model = resident(variant, dtype="bfloat16")
    for kind in ("prune", "both"):
        for space in spaces(variant, kind):
            found = logits(model, make_family_edit(variant, kind, space=space), tokens)
            assert found.dtype == torch.bfloat16
            assert torch.isfinite(found).all()
    if variant.startswith(("deepseek_v3", "glm")):
        assert {layer.correction_bias.dtype for layer in model.layers} == {torch.float32}


@pytest.mark.parametrize(
    ("variant", "retained", "active", "space", "message"),
    [
        ("deepseek_v3-grouped", 5, 2, "probs", r"deepseek_v3 .* 5 experts can't be divided .* 2 routing groups"),
        (
            "deepseek_v3-grouped",
            4,
            3,
            "probs",
            "3 active experts of 4 are more than the 2 in the 1 of 2 routing groups",
        ),
        ("deepseek_v2-grouped", 6, 1, "logits", "deepseek_v2 .* 6 experts can't be divided .* 4 routing groups"),
        ("glm4_moe", 1, 1, "probs", "glm4_moe .* 1 experts are too few"),
        ("gpt_oss", 4, 2, "probs", "gpt_oss .* router_space probs .* use router_space: logits"),
    ],
)
def test_what_a_family_cannot_express_is_refused(
    variant: str, retained: int, active: int, space: str, message: str, resident: Residents, tokens: Tensor
) -> None:
    model = resident(variant)
    before = logits(model, IdentityEdit(), tokens)
    with pytest.raises(UserError, match=message):
        model.apply(make_family_edit(variant, "both", retained, active, space))
    assert isinstance(model.applied, IdentityEdit)
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)
