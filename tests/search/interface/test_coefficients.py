"""Coefficient files in the EEP authors' format: made-up ones, the released ones, and rejected ones."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from search_samples import continuous, eep_space

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.space import EepGenome
from moevolve.search.interface.checkpoints.import_eep import group_layers, read_coefficients

SHARED = Path(os.environ.get("MOEVOLVE_SHARED", Path(__file__).parents[4] / "shared"))
MADE_UP = Path(__file__).parents[2] / "labs" / "eep_release" / "budget_4.pth"
RELEASED = sorted((SHARED / "data" / "eep_coefficients").glob("*.pth"))


def genome_of(path: Path, layers: int, experts: int) -> EepGenome:
    """The genome of a file, with the smallest number of groups."""
    mapping, merging = read_coefficients(path, layers, experts)
    space = eep_space(mapping.shape[1], group_layers(mapping, merging), layers=layers, experts=experts)
    firsts = [space.layer_groups.index(group) for group in range(space.groups)]
    return EepGenome(space, mapping[firsts], merging[firsts])


def test_layers_have_matrices_of_their_own_of_a_range_or_the_others(tmp_path: Path) -> None:
    own, ranged, other, mapping = (torch.full((2, 8), float(value)) for value in range(1, 5))
    torch.save(
        {"layers.1": own, "layers.[2-3]": ranged, "others": other, "others_transfer": mapping}, tmp_path / "f.pth"
    )
    mapped, merged = read_coefficients(tmp_path / "f.pth", layers=5, experts=8)
    assert merged.dtype == mapped.dtype == np.float32
    assert merged[:, 0, 0].tolist() == [3, 1, 2, 2, 3] and (mapped == 4).all()


def test_a_file_in_the_released_form_is_read() -> None:
    """The matrices as torch alone reads them."""
    raw = torch.load(MADE_UP, weights_only=True)
    mapping, merging = read_coefficients(MADE_UP, layers=4, experts=8)
    assert mapping.shape == merging.shape == (4, 4, 8) and mapping.dtype == merging.dtype == np.float32
    for layer, (router, experts) in enumerate(zip(mapping, merging, strict=True)):
        np.testing.assert_array_equal(router, raw["transfer.[0-1]" if layer < 2 else "others_transfer"])
        np.testing.assert_array_equal(experts, raw["layers.[0-1]" if layer < 2 else "others"])
    assert group_layers(mapping, merging) == 2
    check_released(MADE_UP, 4)


@pytest.mark.skipif(not RELEASED, reason="the released coefficient files are not here")
def test_the_22_released_files_become_genomes() -> None:
    assert len(RELEASED) == 22
    for path in RELEASED:
        check_released(path, 32)


def check_released(path: Path, layers: int) -> None:
    mapping, merging = read_coefficients(path, layers, 8)
    retained = int(path.stem.rsplit("_", 1)[1])
    assert mapping.shape == merging.shape == (layers, retained, 8)
    raw = torch.load(path, weights_only=True)
    last = raw.get(f"layers.{layers - 1}", raw["others"]).float().numpy()
    np.testing.assert_array_equal(merging[-1], last)

    genome = genome_of(path, layers, 8)
    assert genome.space.groups in (1, 2, 4, 32)
    groups = list(genome.space.layer_groups)
    np.testing.assert_array_equal(genome.router_mapping[groups], mapping)
    np.testing.assert_array_equal(genome.expert_merging[groups], merging)


def test_layers_are_grouped_as_coarsely_as_they_allow() -> None:
    for groups in (1, 3, 7):
        genome = continuous(eep_space(2, groups, layers=7))
        owners = list(genome.space.layer_groups)
        mapping, merging = genome.router_mapping[owners], genome.expert_merging[owners]
        assert group_layers(mapping, merging) == groups
        mapping[0] += 1
        assert group_layers(mapping, merging) == 7


class _Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo unpickled > unpickled.txt",)


def matrix(rows: int = 2, columns: int = 8) -> torch.Tensor:
    return torch.ones(rows, columns)


WHOLE: dict[str, Any] = {"others": matrix(), "others_transfer": matrix()}
BAD: dict[str, tuple[Any, str]] = {
    "list": ([matrix()], "expected a dict of tensors"),
    "layer missing": ({"layers.[0-2]": matrix(), "others_transfer": matrix()}, "no layers matrix for layer 3"),
    "transfer missing": ({"others": matrix()}, "no transfer matrix for layer 0, and no 'others_transfer'"),
    "columns": ({key: matrix(2, 6) for key in WHOLE}, "matrices have 6 columns, the model has 8 experts"),
    "shapes": (WHOLE | {"layers.1": matrix(3)}, "matrices of different shapes: (2, 8), (3, 8)"),
    "infinite": (WHOLE | {"transfer.[0-1]": matrix() / 0}, "transfer.[0-1] is not a finite matrix"),
    "unknown key": (WHOLE | {"layer.2": matrix()}, "unknown key 'layer.2'; expected layers.*, transfer.*"),
    "layer too high": (WHOLE | {"layers.[2-4]": matrix()}, "layers.[2-4] names layer 4, the model has 4 MoE layers"),
    "layer backwards": (WHOLE | {"layers.[2-1]": matrix()}, "layers.[2-1] names no layer"),
    "layer twice": (WHOLE | {"layers.[0-2]": matrix(), "layers.2": matrix()}, "layers.2 names layer 2 again"),
}


def test_bad_files_are_refused_naming_file_and_key(tmp_path: Path) -> None:
    for content, finding in BAD.values():
        torch.save(content, tmp_path / "bad.pth")
        assert_refused(tmp_path / "bad.pth", finding)
    for missing in (tmp_path / "none.pth", tmp_path):
        assert_refused(missing, "no such coefficient file")


def test_files_of_code_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pth"
    torch.save({**WHOLE, "layers.0": _Payload()}, path)
    for data in (path.read_bytes(), pickle.dumps(_Payload()), b"layers.0: 1", b""):
        path.write_bytes(data)
        assert_refused(path, "not a file of tensors")
        assert not (tmp_path / "unpickled.txt").exists()


def assert_refused(path: Path, finding: str) -> None:
    with pytest.raises(UserError) as caught:
        read_coefficients(path, layers=4, experts=8)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and finding in message and "\n" not in message
