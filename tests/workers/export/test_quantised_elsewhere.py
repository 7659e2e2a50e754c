"""The commands that quantise an export with other programs, run where there are some."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.folder import how_to_quantise

DEMO = Path(__file__).parents[3] / "configs" / "demo"
# Python of an environment that has llm-compressor, which needs another version of transformers.
PYTHON = os.environ.get("MOEVOLVE_TEST_LLMCOMPRESSOR")


def test_plain_stock_checkpoints_have_commands_that_suit_them(tmp_path: Path) -> None:
    compress, convert = how_to_quantise(DEMO / "dense", "stock")
    assert f"output_dir='{DEMO}/dense-fp8'" in compress and f"convert_hf_to_gguf.py {DEMO}/dense --outfile" in convert
    (convert,) = how_to_quantise(DEMO / "model", "stock")
    assert "llama-quantize" in convert, "llm-compressor names a Mixtral's matrices as no server does"
    assert how_to_quantise(DEMO / "dense", "native") == how_to_quantise(DEMO / "model", "source") == []
    shutil.copytree(DEMO / "dense", tmp_path / "packed")
    settings = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps(settings | {"quantization_config": {}}))
    assert how_to_quantise(tmp_path / "packed", "stock") == []


@pytest.mark.skipif(PYTHON is None, reason="MOEVOLVE_TEST_LLMCOMPRESSOR names no Python that has llm-compressor")
@pytest.mark.parametrize("name", ["dense", "fine", "text"])
def test_llm_compressor_opens_an_export_and_its_checkpoint_computes_nearly_the_same(tmp_path: Path, name: str) -> None:
    assert PYTHON is not None
    pytest.importorskip("compressed_tensors")
    shutil.copytree(DEMO / name, tmp_path / "small")
    _, *options = shlex.split(how_to_quantise(tmp_path / "small", "stock")[0].partition(": ")[2])
    subprocess.run([PYTHON, *options], check=True, cwd=tmp_path)
    exact, rounded = (
        load_model(ModelConfig(str(tmp_path / folder), device="cpu", dtype="float32"))[0](torch.arange(20)[None]).logits
        for folder in ("small", "small-fp8")
    )
    assert 0 < (rounded - exact).norm() < 0.3 * exact.norm(), "rounding can send a token to another expert"
