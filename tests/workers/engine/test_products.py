"""A resident model computes the same with all backends of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from edit_checks import Residents
from families import family_edit
from torch import Tensor

from moevolve.kernels import products as kernel
from moevolve.workers.engine.products import make_rows_independent
from moevolve.workers.model.resident import ResidentModel

FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama")

needs_onednn = pytest.mark.skipif(not kernel.onednn_available(), reason="this build of torch has no oneDNN")


def logits(model: ResidentModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.model(input_ids=tokens).logits
    return found


def count_replaced(model: ResidentModel) -> int:
    """Count the modules with a replaced `forward`."""
    return sum(isinstance(module.__dict__.get("forward"), partial) for module in model.model.modules())


@pytest.fixture
def by(resident: Residents, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ResidentModel]]:
    """Returns resident models with a given library for products; resets them to torch after the test."""
    used: list[ResidentModel] = []

    def make(library: str, family: str, **settings: str) -> ResidentModel:
        model = resident(family, **settings)
        used.append(model)
        monkeypatch.setattr(kernel, "onednn_preferred", lambda: library == "onednn")
        make_rows_independent(model.model)
        return model

    yield make
    monkeypatch.setattr(kernel, "onednn_preferred", lambda: False)
    for model in used:
        make_rows_independent(model.model)


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same(family: str, by: Callable[..., ResidentModel], tokens: Tensor) -> None:
    expected = logits(by("torch", family), tokens)
    model = by("onednn", family)
    assert count_replaced(model) > 0
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-4)
    assert count_replaced(by("torch", family)) == count_replaced(model)
    assert torch.equal(logits(model, tokens), expected)


@needs_onednn
def test_edits_are_seen(by: Callable[..., ResidentModel], tokens: Tensor) -> None:
    edit = family_edit("qwen2_moe", "mixed")
    with by("torch", "qwen2_moe").edited(edit) as plain:
        expected = logits(plain, tokens)
    model = by("onednn", "qwen2_moe")
    before = logits(model, tokens)
    with model.edited(edit):
        torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model, tokens), before)


@pytest.mark.parametrize(("family", "dtype"), [("mixtral", "bfloat16"), ("gpt_oss", "float32")])
def test_logits_are_those_of_plain_transformers(
    family: str, dtype: str, resident: Residents, by: Callable[..., ResidentModel], tokens: Tensor
) -> None:
    plain = resident(family, dtype=dtype)
    for module in plain.model.modules():
        module.__dict__.pop("forward", None)
    expected = logits(plain, tokens)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(logits(by("torch", family, dtype=dtype), tokens), expected, rtol=0, atol=tolerance)
