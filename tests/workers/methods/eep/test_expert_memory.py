"""Originals on the host: the number of copies, the device memory they take, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_checks import logits
from families import edit_of_kind
from repair_samples import rows_of, sequences_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.engine.products import make_rows_independent
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep import apply, expert_memory
from moevolve.workers.methods.eep.expert_memory import kept_layers
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
LAYER = 6 * 3 * 32 * 24 * 4
"""Bytes of all experts of one of the three layers."""


class CountingReads(TorchDispatchMode):
    """Counts copies from the originals of each MoE layer."""

    def __init__(self, model: ResidentModel) -> None:
        super().__init__()
        self.copies = [0] * len(model.layers)
        self._layers = {
            model.original_experts(place)["down_proj"].untyped_storage().data_ptr(): place
            for place in range(len(model.layers))
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            place = self._layers.get(args[1].untyped_storage().data_ptr())
            if place is not None:
                self.copies[place] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(model: ResidentModel) -> Iterator[list[int]]:
    mode = CountingReads(model)
    with mode:
        yield mode.copies


def hosted(model_config: Configs, monkeypatch: pytest.MonkeyPatch, layers: float, **settings: str) -> ResidentModel:
    """A model whose device can hold all experts of this many layers."""
    monkeypatch.setattr(apply, "experts_room", lambda *_: int(layers * LAYER))
    return loaded(model_config, expert_offload="host", **settings)


def loaded(model_config: Configs, **settings: str) -> ResidentModel:
    """A model with the products of evaluations: those of MKL itself depend on where a matrix is in memory."""
    model = ResidentModel.load(model_config("mixtral", **settings))
    make_rows_independent(model.model)
    return model


def taken(model: ResidentModel) -> int:
    """Bytes of the experts in use."""
    shown = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in model.layers
        for tensor in layer.expert_tensors().values()
        if tensor.device.type != "meta"
    }
    return sum(shown.values())


@pytest.mark.parametrize(("fitting", "copies"), [(3.0, [1, 1, 1]), (2.5, [1, 4, 4]), (1.0, [4, 4, 4])])
def test_a_full_model_copies_what_does_not_fit_once_a_pass_and_the_rest_once(
    fitting: float,
    copies: list[int],
    model_config: Configs,
    monkeypatch: pytest.MonkeyPatch,
    tokens: Tensor,
) -> None:
    model, expected = hosted(model_config, monkeypatch, fitting), logits(loaded(model_config), IdentityEdit(), tokens)
    with counting(model) as counted:
        for _ in range(4):
            assert torch.equal(logits(model, IdentityEdit(), tokens), expected)
    assert counted == copies
    assert taken(model) <= fitting * LAYER


@pytest.mark.parametrize(("kind", "retained", "fitting"), [("mixed", 5, 2.0), ("both", 6, 1.0), ("prune", 3, 0.5)])
def test_candidates_of_any_size_run_where_they_do_not_all_fit(
    kind: str,
    retained: int,
    fitting: float,
    model_config: Configs,
    monkeypatch: pytest.MonkeyPatch,
    tokens: Tensor,
) -> None:
    """Results are bit for bit those with originals on the device, whatever ran before."""
    model, other = hosted(model_config, monkeypatch, fitting), loaded(model_config)
    edits: list[Edit] = [
        edit_of_kind(3, 6, kind, retained),
        IdentityEdit(),
        edit_of_kind(3, 6, kind, retained, active=1, seed=4),
        edit_of_kind(3, 6, kind, 2, seed=1),
        edit_of_kind(3, 6, kind, retained),
        IdentityEdit(),
    ]
    for edit in edits:
        for _ in range(2):
            assert torch.equal(logits(model, edit, tokens), logits(other, edit, tokens))


def test_room_follows_what_a_layer_runs_on(
    model_config: Configs, monkeypatch: pytest.MonkeyPatch, tokens: Tensor
) -> None:
    """Memory that holds half the experts of all layers holds two whole layers; neither is copied twice."""
    model, half = hosted(model_config, monkeypatch, 2.0), edit_of_kind(3, 6, "prune", 3)
    for _ in range(2):
        with counting(model) as counted:
            logits(model, IdentityEdit(), tokens)
        assert counted == [1, 1, 1]
        with counting(model) as counted, model.edited(half), torch.inference_mode():
            assert taken(model) <= 2 * LAYER
            for _ in range(3):
                model.model(tokens)
        assert counted == [3, 3, 3], "three experts of each layer, once"


@pytest.mark.parametrize(("kind", "fitting"), [("both", 3.0), ("prune", 1.0)])
def test_a_repair_changes_what_stays(
    kind: str,
    fitting: float,
    model_config: Configs,
    monkeypatch: pytest.MonkeyPatch,
    tokens: Tensor,
) -> None:
    """Repaired layers have memory of their own in any case, since copying them again would undo the repair."""
    model, other = hosted(model_config, monkeypatch, fitting), ResidentModel.load(model_config("mixtral"))
    fitted = RepairedEdit(edit_of_kind(3, 6, kind), RepairSettings((0.1, 1.0)), rows_of(sequences_of([9, 14, 11, 17])))
    for edit in (fitted, edit_of_kind(3, 6, kind, 6), IdentityEdit()):
        assert float((logits(model, edit, tokens) - logits(other, edit, tokens)).abs().max()) < 1e-4
        assert torch.equal(logits(model, edit, tokens), logits(model, edit, tokens))


def test_what_was_free_and_is_not_makes_layers_take_turns(
    model_config: Configs, monkeypatch: pytest.MonkeyPatch, tokens: Tensor
) -> None:
    model, expected = hosted(model_config, monkeypatch, 3.0), logits(loaded(model_config), IdentityEdit(), tokens)
    take, left = expert_memory.ExpertSpec.allocate, [2]

    def short(content: expert_memory.ExpertSpec, device: torch.device) -> dict[str, Tensor]:
        if device.type != "meta":
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("there is no more")
        return take(content, device)

    monkeypatch.setattr(expert_memory.ExpertSpec, "allocate", short)
    for _ in range(3):
        assert torch.equal(logits(model, IdentityEdit(), tokens), expected)


def test_how_many_layers_keep_theirs() -> None:
    assert [kept_layers(32, 3, allowed) for allowed in (96, 95, 94, 93, 6, 5, 3, 0)] == [32, 30, 30, 30, 1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["both", None])
def test_what_does_not_all_fit_is_exported_as_where_it_does(
    kind: str | None, model_config: Configs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    edit = IdentityEdit() if kind is None else edit_of_kind(3, 6, kind, 5)
    card = ExportCard(title="A small model", base_model="someone/base", base_fingerprint="f00d")
    export_model(hosted(model_config, monkeypatch, 1.0), edit, tmp_path / "streamed", card)
    export_model(loaded(model_config), edit, tmp_path / "whole", card)
    weights = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("streamed", "whole")]
    assert [each.read_bytes() for each in weights[0]] == [each.read_bytes() for each in weights[1]] != []
