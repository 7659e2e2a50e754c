"""Which programs load an exported checkpoint, known from tries or from their loaders' code."""

from __future__ import annotations

from pathlib import Path

from moevolve.workers.checkpoints.files import read_json
from moevolve.workers.contract.card import CheckpointForm

# Dense models whose narrower versions are other sizes of the same family for every program.
_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_OLDER = "transformers 4.57"
# Model types that a program loads.
_LOADED: dict[str, tuple[str, ...]] = {
    # `tests/benchmarks/served.py --stock`: it computes the same.
    _OLDER: (
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "glm4_moe", "gpt_oss", "deepseek_v3", "dots1"),
        *("ernie4_5_moe", "hunyuan_v1_moe", "jamba", "phimoe", "qwen3_next", "deepseek_v2", "granitemoe"),
        *("granitemoeshared", "llama4_text"),
    ),
    # `tests/benchmarks/served.py`: vLLM's log-probabilities are the edited model's, or it can't run them on a CPU.
    "vLLM": (
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "gemma4_text", "granitemoe"),
        *("granitemoeshared", "granitemoehybrid", "dots1", "solar_open", "exaone_moe", "mellum", "hunyuan_v1_moe"),
        *("flex_olmo", "minimax_m2", "laguna", "deepseek_v32", "glm_moe_dsa", "qwen3_next", "nemotron_h", *_DENSE),
    ),
    # `tests/workers/export/test_servers.py`: the names, shapes and config fields that the loaders read.
    "SGLang": (
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"),
        *("gpt_oss", *_DENSE),
    ),
    # `tests/workers/export/test_gguf.py`: llama.cpp computes the logits of these architectures.
    "llama.cpp (after its convert_hf_to_gguf.py)": ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", *_DENSE),
}


def loads_in(directory: Path, form: CheckpointForm | str) -> tuple[str, ...]:
    """Return the names of the programs that load an export: those of its model type if it has no own code."""
    if any(directory.glob("*.gguf")):
        return ("llama.cpp",)
    if form == "native":
        return ("transformers (trust_remote_code=True)",)
    settings = read_json(directory / "config.json")
    found = [program for program, kinds in _LOADED.items() if settings.get("model_type") in kinds]
    # It masks groups with 0, which is above a negative score, so that it chooses experts of other groups.
    limited = settings.get("n_group") != settings.get("topk_group")
    if _OLDER in found and (limited or form != "stock"):
        found.remove(_OLDER)
    return ("transformers", *found)
