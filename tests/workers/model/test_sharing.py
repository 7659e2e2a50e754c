"""Weights that workers of a node share: the same bits as without, each worker's changes its own, gone with the last."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from moevolve.workers.config import ModelConfig
from moevolve.workers.model import sharing
from moevolve.workers.model.loading import load_model
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.model.sharing import load_shared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Configs = Callable[..., ModelConfig]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared through /proc")

SHARING = (
    ("mixtral", "float32"),  # ties its embeddings
    ("mixtral", "bfloat16"),
    ("qwen2_moe", "bfloat16"),  # has shared experts, and a dense layer
    ("deepseek_v3-grouped", "bfloat16"),  # has a correction bias in float32
    ("gpt_oss", "float32"),  # has biases, and keeps its experts transposed
    ("llama", "bfloat16"),  # was saved in float32
)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where files go; each test has its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"moevolve-weights-{os.getuid()}"


@pytest.fixture(autouse=True)
def no_files_left(folder: Path) -> Iterator[None]:
    """This process outlives its tests: close what it keeps for others."""
    yield
    for file in files_of(os.getpid()):
        os.close(int(file.name))


def files_of(process: int) -> Mapping[Path, int]:
    """Files without a name that a process has open where a test keeps such files, and their inodes."""
    found = {}
    for each in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing itself has one open
            if each.readlink().is_relative_to(tempfile.gettempdir()):
                found[each] = each.stat().st_ino
    return found


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Also those that are no part of its state."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize(("family", "dtype"), SHARING)
def test_shared_weights_are_those_that_are_loaded(
    family: str, dtype: str, model_config: Configs, tokens: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    config = model_config(family, dtype=dtype)
    plain, _ = load_model(config)
    first, (second, tokenizer) = load_shared(config)[0], load_shared(config)
    assert len(set(files_of(os.getpid()).values())) == 1
    assert not [record for record in caplog.records if record.name == sharing.__name__]
    assert tokenizer("the quick brown fox")["input_ids"]
    for model in (first, second):
        assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
        assert tensors(model).keys() == tensors(plain).keys()
        for name, tensor in tensors(plain).items():
            other = tensors(model)[name]
            assert (other.dtype, other.stride()) == (tensor.dtype, tensor.stride())
            # Where sums begin in a cache line can decide about their last digits.
            assert name not in plain.state_dict() or other.data_ptr() % 64 == tensor.data_ptr() % 64
            assert torch.equal(other, tensor)
        assert torch.equal(logits(model, tokens), logits(plain, tokens))
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()
        assert model.config.to_dict() | {"_name_or_path": ""} == plain.config.to_dict() | {"_name_or_path": ""}


def test_what_is_changed_in_place_stays_its_own(model_config: Configs, tokens: Tensor) -> None:
    config = model_config("mixtral")
    changed, kept = ResidentModel.load(config, share=True), ResidentModel.load(config, share=True)
    before = logits(kept.model, tokens)
    assert torch.equal(logits(changed.model, tokens), before)
    with torch.inference_mode():
        for parameter in changed.model.parameters():
            parameter.data.mul_(0.5)
    assert not torch.equal(logits(changed.model, tokens), before)
    assert torch.equal(logits(kept.model, tokens), before)
    assert torch.equal(logits(load_shared(config)[0], tokens), before)


PROGRAM = """
import sys
import torch
from moevolve.workers.config import ModelConfig
from moevolve.workers.model.sharing import load_shared
model, _ = load_shared(ModelConfig(sys.argv[1], device="cpu"))
for _ in sys.stdin:
    with torch.inference_mode():
        print(model.lm_head.weight.double().sum().item(), flush=True)
        model.lm_head.weight.data.zero_()
"""


def test_the_file_is_there_for_as_long_as_a_worker_lives(model_config: Configs, folder: Path) -> None:
    """Whichever of them: here the one that wrote it is killed."""
    config = model_config("olmoe")
    command = [sys.executable, "-c", PROGRAM, config.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        try:
            found = ask(worker)
            inodes = set(files_of(worker.pid).values())
            ours = load_shared(config)[0]
            assert len(inodes) == 1 and set(files_of(os.getpid()).values()) == inodes
            assert ask(worker) == 0
        finally:
            worker.kill()
    again = load_shared(config)[0]
    assert set(files_of(os.getpid()).values()) == inodes
    for model in (ours, again):
        assert model.lm_head.weight.double().sum().item() == found != 0
    lines = next(folder.iterdir()).read_text().split()
    assert set(map(Path, lines)) == set(files_of(os.getpid()))
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def ask(worker: subprocess.Popen[str]) -> float:
    """The sum of a worker's output embeddings, which it sets to zero then."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def test_of_workers_that_start_at_once_one_writes(model_config: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = sharing._write
    monkeypatch.setattr(sharing, "_write", lambda model, key: written.append(key) or write(model, key))
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: load_shared(model_config("mixtral"))[0], range(4)))) == 4
    assert len(written) == len(set(files_of(os.getpid()).values())) == 1


def test_files_of_others_are_not_taken(model_config: Configs, folder: Path, tokens: Tensor) -> None:
    """By their numbers, which other processes may have by now; or because they are broken."""
    config = model_config("mixtral")
    load_shared(config)
    (register,) = folder.iterdir()
    file = Path(register.read_text().strip())
    broken = folder.parent / "broken"
    broken.write_bytes(file.read_bytes()[:-100])
    read, write = os.pipe()
    load_shared(replace(config, dtype="bfloat16"))
    (another,) = (each for each in files_of(os.getpid()) if each.stat().st_ino != file.stat().st_ino)
    lines = (broken, f"/proc/{os.getpid()}/fd/{read}", "/proc/1/fd/0", "/proc/4194305/fd/3", another)
    register.write_text("".join(f"{line}\n" for line in lines))
    model, _ = load_shared(config)
    os.close(read)
    os.close(write)
    (line,) = register.read_text().split()
    assert line not in map(str, (*lines, file))
    assert torch.equal(logits(model, tokens), logits(load_model(config)[0], tokens))


@pytest.mark.parametrize(
    ("trouble", "reason"), [("full", "0 MiB left"), ("open", "its owner alone"), ("changed", "came back")]
)
def test_workers_have_their_own_weights_where_these_cant_be_shared(
    trouble: str,
    reason: str,
    model_config: Configs,
    folder: Path,
    tokens: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = model_config("mixtral")
    match trouble:
        case "full":
            usage = shutil.disk_usage(folder.parent)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        case "open":
            folder.mkdir(mode=0o755)
        case "changed":
            monkeypatch.setattr(sharing, "_NAMES", sharing._NAMES | {torch.float32: "I32"})
    with caplog.at_level(logging.WARNING, sharing.__name__):
        model, _ = load_shared(config)
    assert reason in caplog.text
    assert torch.equal(logits(model, tokens), logits(load_model(config)[0], tokens))
    assert not files_of(os.getpid())


def test_nothing_is_written_where_nothing_is_gained(model_config: Configs, folder: Path) -> None:
    for config in (model_config("llama"), replace(model_config("mixtral"), trust_remote_code=True)):
        load_shared(config)
    assert not folder.exists()


def test_the_file_is_for_its_owner_alone(model_config: Configs, folder: Path) -> None:
    load_shared(model_config("mixtral"))
    (file,) = files_of(os.getpid())
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir(), file)] == [0o700, 0o600, 0o600]
    with safe_open(file, "pt") as weights:  # what safetensors itself takes for its form
        assert "model.layers.0.mlp.experts.gate_up_proj" in weights.keys()  # noqa: SIM118
