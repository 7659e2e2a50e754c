"""Which programs an export names as those that load it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moevolve.workers.export.servers import loads_in

ALL = ("vLLM", "SGLang", "llama.cpp (after its convert_hf_to_gguf.py)")


@pytest.mark.parametrize(
    ("kind", "form", "programs"),
    [
        ("mixtral", "stock", ("transformers", "transformers 4.57", *ALL)),
        ("qwen2", "stock", ("transformers", *ALL)),
        ("deepseek_v3", "source", ("transformers", "SGLang")),
        ("afmoe", "stock", ("transformers",)),
        ("mixtral", "native", ("transformers (trust_remote_code=True)",)),
    ],
)
def test_programs_are_those_of_the_model_type_if_there_is_no_own_code(
    tmp_path: Path, kind: str, form: str, programs: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert loads_in(tmp_path, form) == programs


def test_a_gguf_file_is_llama_cpps(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert loads_in(tmp_path, "source") == ("llama.cpp",)
