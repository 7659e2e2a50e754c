"""NanoMoE edits on resident models against models whose weights are the dense products."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import edit_checks
import numpy as np
import oracles
import pytest
import torch
from edit_checks import Residents, logits
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit, Variant
from moevolve.workers.methods.nanomoe.method import BlockMixedLinear
from moevolve.workers.methods.nanomoe.mixing import low_rank_factors, split_factors
from moevolve.workers.model.resident import ResidentModel

Checkpoints = Callable[[str], Path]

PATTERNS = {"llama": "*.mlp.*", "opt": "*.fc[12]", "phi": "*.mlp.*", "mixtral": "*.self_attn.*"}
assert_close = partial(edit_checks.assert_close, tolerance=2e-5)
VARIANTS: tuple[Variant, ...] = ("I", "II", "III", "low_rank")


def names_of(model: ResidentModel, pattern: str) -> tuple[str, ...]:
    return tuple(name for name in find_linears(model.model) if fnmatchcase(name, pattern))


def make(
    model: ResidentModel, variant: Variant, noise: float = 0.3, *, pattern: str | None = None, **changes: int
) -> NanoMoeEdit:
    """An edit with parameters `noise` away from the start, by default with K = 4 and r = 6."""
    names = names_of(model, pattern or PATTERNS[model.model.config.model_type])
    blocks = 1 if variant == "low_rank" else changes.pop("blocks", 4)
    form = BlockForm(variant, blocks, changes.pop("rank", 6))
    steps = np.random.default_rng(0).normal(0, noise, (len(names), *form.mixing_shape))
    return NanoMoeEdit(form, names, (form.unmixed + steps).astype(np.float32), **changes)


def plain_logits(directory: Path, edit: NanoMoeEdit, ids: Tensor) -> Tensor:
    """Logits of the checkpoint with every chosen layer's weight replaced by the dense product."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    linears = find_linears(model)
    for name, parameters in zip(edit.layers, edit.mixing, strict=True):
        weight = linears[name].weight
        u, v = split_factors(*low_rank_factors(weight, edit.form.rank), edit.form.blocks)
        mixing = None if edit.form.variant == "low_rank" else torch.tensor(parameters).double()
        weight.data = oracles.block_mix_weight(u, v, mixing).float()
    with torch.inference_mode():
        return model(ids).logits


# Every form in one family, and every family in one form.
@pytest.mark.parametrize(
    ("family", "variant"), [("llama", "low_rank"), ("opt", "II"), ("phi", "III"), ("mixtral", "I")]
)
def test_edited_logits_are_the_dense_products(
    family: str, variant: Variant, resident: Residents, checkpoint: Checkpoints, tokens: Tensor
) -> None:
    model = resident(family)
    edit = make(model, variant)
    assert len(edit.layers) >= 6
    found = logits(model, edit, tokens)
    assert_close(found, plain_logits(checkpoint(family), edit, tokens))
    assert float((found - logits(model, IdentityEdit(), tokens)).abs().max()) > 0.05


def test_a_candidate_does_not_depend_on_those_before_it(resident: Residents, tokens: Tensor) -> None:
    model = resident("llama")
    wanted = make(model, "II", fit=1)
    fresh = logits(model, wanted, tokens)
    changed = wanted.mixing.copy()
    changed[1] += 1
    others = [
        make(model, "III", 1.0),
        make(model, "II", rank=3),
        make(model, "II", pattern="*.q_proj"),
        make(model, "II", fit=2),
        NanoMoeEdit(wanted.form, wanted.layers, changed, fit=1),
    ]
    for other in others:
        assert not torch.equal(logits(model, other, tokens), fresh)
        assert torch.equal(logits(model, wanted, tokens), fresh)
    with model.edited(others[0]):
        model.apply(others[2])
        model.apply(wanted)
        with torch.inference_mode():
            assert torch.equal(model.model(tokens).logits, fresh)


def test_candidates_share_their_factors(resident: Residents) -> None:
    """Once the layers are fitted, a candidate computes only M."""
    model = resident("llama", dtype="bfloat16")
    first = make(model, "II")
    other = NanoMoeEdit(first.form, first.layers, first.mixing + np.float32(0.5))
    shown = []
    for edit in (first, other):
        with model.edited(edit):
            shown.append([each for each in model.model.modules() if isinstance(each, BlockMixedLinear)])
    for one, two in zip(*shown, strict=True):
        assert one is not two and one.mixing is not None and two.mixing is not None
        assert not torch.equal(one.mixing, two.mixing)
        assert (one.u.data_ptr(), one.v.data_ptr()) == (two.u.data_ptr(), two.v.data_ptr())


def test_sixteen_bit_models_are_edited(resident: Residents, tokens: Tensor) -> None:
    model = resident("llama", dtype="float16")
    full = resident("llama")
    for variant in VARIANTS:
        found = logits(model, make(model, variant, 0.05), tokens)
        assert found.dtype == torch.float16
        assert_close(found.float(), logits(full, make(full, variant, 0.05), tokens), tolerance=0.05)


def test_factors_out_of_range_are_the_candidates_fault(resident: Residents) -> None:
    model = resident("llama", dtype="float16")
    edit = make(model, "I")
    edit.mixing[0] = 1e30
    with pytest.raises(CandidateError, match=r"layers\.0\.mlp\.gate_proj"), model.edited(edit):
        pass
    assert isinstance(model.applied, IdentityEdit)


def test_an_edit_of_another_model_is_refused(resident: Residents, tokens: Tensor) -> None:
    llama, opt = resident("llama"), resident("opt")
    before = logits(opt, IdentityEdit(), tokens)
    with pytest.raises(UserError, match=r"linear layer layers\.0\.mlp\.gate_proj, which the model doesn't have"):
        opt.apply(make(llama, "I"))
    names = names_of(opt, "*.fc1")
    form = BlockForm("I", 5, 4)
    with pytest.raises(UserError, match=r"5 blocks of rank 4 don't fit linear layer layers\.0\.fc1"):
        opt.apply(NanoMoeEdit(form, names, np.ones((len(names), 5, 5), np.float32)))
    assert torch.equal(logits(opt, IdentityEdit(), tokens), before)
    with pytest.raises(UserError, match="needs mixing parameters"):
        NanoMoeEdit(form, names, np.ones((len(names), 5, 4), np.float32))


def test_phenotype_hash_tells_edits_apart(resident: Residents) -> None:
    model = resident("llama")
    base = make(model, "II")
    edits = [
        base,
        make(model, "I"),
        make(model, "II", rank=5),
        make(model, "II", fit=1),
        make(model, "II", pattern="*.up_proj"),
        NanoMoeEdit(base.form, base.layers, base.mixing + np.float32(1)),
        NanoMoeEdit(base.form, base.layers[::-1], base.mixing),
    ]
    assert len({edit.phenotype_hash for edit in edits}) == len(edits)
    assert make(model, "II").phenotype_hash == base.phenotype_hash


@pytest.mark.parametrize(("variant", "blocks"), [("I", 6), ("II", 8), ("III", 6), ("low_rank", 1)])
def test_counted_parameters_are_those_of_the_module(variant: Variant, blocks: int) -> None:
    form = BlockForm(variant, blocks, 5)
    mixing = None if variant == "low_rank" else torch.from_numpy(form.unmixed)
    module = BlockMixedLinear(torch.ones(blocks, 48 // blocks, 5), torch.ones(blocks, 5, 24 // blocks), mixing, None)
    assert sum(each.numel() for each in module.parameters()) == form.parameters(48, 24)
