"""Coefficient files imported with a model's config alone, or with its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moevolve.store.records import UNBOUND
from moevolve.store.repository import Store

RELEASE = Path(__file__).parents[2] / "labs" / "eep_release" / "budget_4.pth"


def write_released(path: Path, experts: int) -> None:
    """A file in the form of the EEP authors' release, of two retained experts.

    Of four layers: what two layers share, one layer's own, and what is left over.
    """
    numbers = torch.Generator().manual_seed(5)
    keys = [f"{kind}.{owner}" for kind in ("layers", "transfer") for owner in ("[0-1]", "2")]
    tensors = {key: torch.rand(2, experts, generator=numbers) for key in (*keys, "others", "others_transfer")}
    torch.save(tensors, path)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    path = tmp_path / "made_budget_2.pth"
    write_released(path, experts=4)
    return path


@pytest.fixture
def config_only(tiny: Any, tmp_path: Path) -> Path:
    """A folder with a config.json as those in configs/models/."""
    folder = tmp_path / "config"
    folder.mkdir()
    shutil.copy(tiny.model / "config.json", folder)
    return folder


@pytest.fixture
def others(tiny: Any, tmp_path: Path) -> Path:
    """A checkpoint of the same shapes with other weights."""
    folder = tmp_path / "others"
    shutil.copytree(tiny.model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def imported(released: Path, config_only: Path, in_process: Any) -> str:
    done = in_process("import-eep", released, "--experts-of", config_only, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["experts"], row["groups"]) == (2, 3)
    return str(row["ref"])


def refusal(done: Any) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return str(done.stderr)


def the_search(folder: Path) -> Any:
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        return store.searches()[0].search


def test_a_file_that_torch_alone_wrote_is_imported_with_a_config_alone(in_process: Any, config_only: Path) -> None:
    settings = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(json.dumps(settings | {"num_local_experts": 8}))
    done = in_process("import-eep", RELEASE, "--experts-of", config_only, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["ref"], row["experts"], row["groups"]) == ("budget_4:0", 4, 2)
    # Four of eight experts less, three matrices of 16 x 16 each, in four layers; a continuous mapping keeps the gate.
    detail = json.loads(in_process("show", "budget_4:0", "--json").stdout)
    shown = detail["individual"]
    assert shown["parameters"] == shown["parameters_full"] - 4 * 4 * 3 * 16 * 16
    assert (shown["experts"], shown["parents"], detail["evaluations"]) == (4, [], [])


def test_a_config_that_comes_with_the_package_is_enough(in_process: Any, tmp_path: Path) -> None:
    """46.7 G parameters, of which nothing but the shapes is there; a long file name is cut to one of a search."""
    file, name = tmp_path / f"{'a' * 201}.pth", "a" * 200
    write_released(file, experts=8)
    done = in_process("import-eep", file, "--experts-of", "mixtral-8x7b", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["ref"] == f"{name}:0"
    shown = json.loads(in_process("show", f"{name}:0", "--json").stdout)["individual"]
    # Each expert left out takes its three matrices along; the continuous mapping keeps the gate.
    expert = 3 * 4096 * 14336
    assert shown["parameters"] == shown["parameters_full"] - 32 * 6 * expert
    # At 4 of 8 experts it fits a card of 80 GB in bfloat16 with its originals on the host only.
    stored = json.loads(the_search(tmp_path).config)
    model = stored["model"]
    assert (model["dtype"], model["own_dtype"], model["expert_offload"]) == ("auto", "bfloat16", "host")
    assert stored["engine"]["chat_template"] == "mixtral"
    assert "no such folder" in refusal(in_process("import-eep", file, "--experts-of", "mixtrall"))
    # A list of experts is nobody's in particular: it gets the checkpoint's own template.
    (tmp_path / "mask.json").write_text(json.dumps([[1, 1, 0, 1, 0, 0, 1, 0]] * 32))
    assert in_process("import-eep", "mask.json", "--experts-of", "mixtral-8x7b", cwd=tmp_path).returncode == 0
    with Store.open(f"sqlite:///{tmp_path / 'moevolve.db'}") as store:
        engines = {each.search.name: json.loads(each.search.config)["engine"] for each in store.searches()}
    assert engines["mask"]["chat_template"] == "auto"


def test_how_the_model_is_held_can_be_said_when_it_is_evaluated(released: Path, tiny: Any, in_process: Any) -> None:
    assert in_process("import-eep", released, "--experts-of", tiny.model).returncode == 0
    evaluate = ("evaluate", f"{released.stem}:0", "--task", tiny.task)

    def scored(*more: str) -> float:
        done = in_process(*evaluate, "--json", *more)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["models"][0]["records"][0]["gold_logprob"])

    own = scored()
    narrow = scored("--set", "model.dtype=bfloat16", "--set", "model.expert_offload=device")
    assert narrow != own and narrow == pytest.approx(own, rel=0.05)
    assert scored() == own
    assert "only `model.*` and `engine.*`" in refusal(in_process(*evaluate, "--set", "seed=2"))


def test_what_needs_no_weights_asks_for_none(imported: str, tiny: Any, in_process: Any, tmp_path: Path) -> None:
    name = imported.partition(":")[0]
    for command in (("best",), ("show", imported), ("lineage", imported), ("plot", name, "-o", tmp_path / "p.png")):
        assert in_process(*command).returncode == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    for command in (
        ("evaluate", "full", "--task", tiny.task),
        ("export", imported, tmp_path / "out"),
        ("analyse", imported, "--task", tiny.task),
        ("profile", imported, "--model", tiny.model),
    ):
        message = refusal(in_process(*command))
        assert "needs the weights" in message and f"moevolve db prune {name}" in message
    assert not (tmp_path / "out").exists()
    assert the_search(tmp_path).model_fingerprint.startswith(UNBOUND)


def test_an_import_is_about_the_weights_that_it_was_made_with(
    released: Path, others: Path, tiny: Any, in_process: Any, tmp_path: Path
) -> None:
    assert in_process("import-eep", released, "--experts-of", tiny.model).returncode == 0
    assert not the_search(tmp_path).model_fingerprint.startswith(UNBOUND)
    evaluate = ("evaluate", f"{released.stem}:0", "--task", tiny.task, "--json")
    first = in_process(*evaluate)
    assert first.returncode == 0, first.stderr
    score = json.loads(first.stdout)["models"][0]["records"][0]["score"]
    assert "not the checkpoint" in refusal(in_process(*evaluate, "--model", others))
    shown = json.loads(in_process("show", f"{released.stem}:0", "--json").stdout)
    assert [item["score"] for item in shown["evaluations"]] == [score]


def test_a_search_whose_weights_have_moved(released: Path, tiny: Any, in_process: Any, tmp_path: Path) -> None:
    """They can be named wherever they are now, for searches of any kind; the card of an export says where."""
    shutil.copytree(tiny.model, tmp_path / "before")
    assert in_process("import-eep", released, "--experts-of", tmp_path / "before").returncode == 0
    (tmp_path / "before").rename(tmp_path / "after")
    name = released.stem
    assert in_process("export", f"{name}:0", tmp_path / "out").returncode == 2
    done = in_process("export", f"{name}:0", tmp_path / "out", "--model", tmp_path / "after")
    assert done.returncode == 0, done.stderr
    assert the_search(tmp_path).model_fingerprint in (tmp_path / "out" / "README.md").read_text()
