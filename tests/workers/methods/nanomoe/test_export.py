"""NanoMoE exports: exact, and loadable without moevolve."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from edit_checks import Computed, Found, assert_same_elsewhere, computed
from torch import Tensor

from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit, Variant
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]

CARD = ExportCard(title="A small model", base_model="someone/base", base_fingerprint="f00d")
CASES: dict[str, tuple[str, Variant, str]] = {
    "opt-III-native": ("opt", "III", "*.fc?"),
    "phi-low-rank-native": ("phi", "low_rank", "*"),
    "mixtral-I-native": ("mixtral", "I", "*.self_attn.*"),
}


def make(resident: ResidentModel, variant: Variant, pattern: str) -> NanoMoeEdit:
    names = tuple(name for name in find_linears(resident.model) if fnmatchcase(name, pattern))
    form = BlockForm(variant, 1 if variant == "low_rank" else 4, 3)
    steps = np.random.default_rng(0).normal(0, 0.3, (len(names), *form.mixing_shape))
    return NanoMoeEdit(form, names, (form.unmixed + steps).astype(np.float32))


def test_exports_load_and_agree_without_moevolve(
    model_config: Configs, tokens: Tensor, outsider: Callable[[list[Path], Tensor], Found], tmp_path: Path
) -> None:
    expected: dict[Path, Computed] = {}
    for name, (family, variant, pattern) in CASES.items():
        resident = ResidentModel.load(model_config(family))
        edit, directory = make(resident, variant, pattern), tmp_path / name
        sizes = {each.name: (each.outputs, each.inputs) for each in describe_model(model_config(family)).linears}
        full = describe_model(model_config(family)).parameters
        expected[directory] = computed(resident, edit, tokens)
        report = export_model(resident, edit, directory, CARD)
        assert (report.form, report.agreement.holds) == ("native", True)
        assert isinstance(resident.applied, IdentityEdit)
        saved = sum(sizes[each][0] * sizes[each][1] - edit.form.parameters(*sizes[each]) for each in edit.layers)
        assert report.parameters == full - saved
        card = (directory / "README.md").read_text()
        assert f"{report.parameters:,} ({full:,} before)" in card and f"| variant | {variant} |" in card

    assert_same_elsewhere(expected, outsider(list(expected), tokens))
