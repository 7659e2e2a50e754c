"""Loads pruned checkpoints elsewhere, and compares what they compute there with the resident model.

    python tests/benchmarks/served.py /opt/vllm/bin/python [VARIANT...]
    python tests/benchmarks/served.py --stock /opt/transformers-4.57/bin/python [VARIANT...]

The first argument is the Python of an environment that has vLLM, or with `--stock` any version of `transformers`, the
others are model types of `families.yaml`, all by default. Checkpoints are random, in float32, spelled as published
ones, and as narrow as vLLM's kernels allow. A row has the largest difference of the mean log-probability of four texts,
in nats per token, for a checkpoint that was pruned in its own format and for its source, or the reason why vLLM doesn't
run it. With `--stock` it has the largest difference of logits, for a pruned stock checkpoint and for its source.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from edit_checks import CARD, logits, write_source
from families import COMMON, VARIANTS, edit_of_kind, random_model
from numpy.typing import NDArray
from outsider import Outsider
from published_spelling import spell_as_published
from tiny_models import word_tokenizer

from moevolve.workers.contract.edits import Edit, IdentityEdit, Tokens
from moevolve.workers.contract.messages import WorkerFault
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.texts import TextScorer
from moevolve.workers.export.export import export_model
from moevolve.workers.families.registry import only_inside
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.vllm.process import VllmProcess

# Qwen2-MoE with experts in all layers.
OTHERWISE: dict[str, dict[str, Any]] = {"qwen2_moe": {"norm_topk_prob": True, "mlp_only_layers": []}}
WIDER = {4: 32, 6: 32, 8: 32, 10: 32, 12: 32, 16: 32, 20: 32, 24: 32, 40: 64}
"""Sizes of matrices by those of the tests' tiny models, which are narrower than kernels allow."""
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
PUBLISHED = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2")
ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "use_routing_bias": True}
"""Fields of some families' published configs that vLLM reads and `transformers` doesn't."""


def settings_of(variant: str) -> dict[str, Any]:
    """Settings of a model's config."""
    own = {**VARIANTS[variant].settings, **OTHERWISE.get(variant, {})}
    wider = {name: WIDER.get(size, size) if _is_size(name) else size for name, size in own.items()}
    wider |= {name: size for name, size in MLA.items() if "kv_lora_rank" in own and own.get(name)}
    wider |= {"index_head_dim": 128} if "index_head_dim" in own else {}
    head = {} if "kv_lora_rank" in own else {"head_dim": 32}
    wider |= {"swiglu_limit": 7.0} if variant == "gpt_oss" else {}  # vLLM knows no other
    routing = ROUTING if variant.split("-", maxsplit=1)[0] in PUBLISHED else {}
    return COMMON | {"hidden_size": 128} | head | wider | routing


def _is_size(name: str) -> bool:
    return name.endswith(("_dim", "intermediate_size", "_rank", "moe_hidden_size", "moe_latent_size"))


def write(variant: str, folder: Path) -> ModelConfig:
    """Write a random checkpoint."""
    random_model(variant, seed=0, **settings_of(variant)).save_pretrained(folder)
    word_tokenizer([f"w{i}" for i in range(4, COMMON["vocab_size"])]).save_pretrained(folder)
    spell_as_published(folder)
    return ModelConfig(str(folder), dtype="float32", device="cpu")


def difference(python: str, folder: Path, texts: list[Tokens], expected: NDArray[np.float64]) -> str:
    """Compare vLLM's log-probabilities of texts in a checkpoint with expected ones."""
    options = {"enforce_eager": True, "dtype": "float32", "max_model_len": COMMON["max_position_embeddings"]}
    try:
        vllm = VllmProcess(python, folder, options)
        found = vllm.logprobs(texts, [len(text) - 1 for text in texts])
        vllm.close()
    except WorkerFault as fault:
        return " ".join(str(fault).split())[:90]
    return f"{np.abs(expected - found).max():.1e}"


def row(variant: str, python: str, place: Path) -> tuple[str, str]:
    """Differences of the pruned checkpoint and of its source."""
    config = write(variant, place / "source")
    resident = ResidentModel.load(config)
    engine = GenerationEngine(resident.model, resident.tokenizer, EngineConfig())
    edit = edit_of_kind(len(resident.layers), resident.layers[0].count, "prune", space="logits")
    write_source(config, edit, place / "pruned")
    numbers = np.random.default_rng(0)
    texts = [tuple(numbers.integers(4, COMMON["vocab_size"], size).tolist()) for size in (9, 14, 20, 31)]

    def compared(edit: Edit, name: str) -> str:
        with torch.inference_mode(), resident.edited(edit):
            expected = TextScorer(engine.forward).logprobs(texts)
        return difference(python, place / name, texts, expected)

    return compared(edit, "pruned"), compared(IdentityEdit(), "source")


def stock_row(variant: str, python: str, place: Path) -> tuple[str, str]:
    """Differences of logits of the stock checkpoint and of its source, as another `transformers` reads them."""
    config = write(variant, place / "source")
    resident = ResidentModel.load(config)
    if only_inside(resident.model.config.model_type):
        return "no stock form", "-"
    edit = edit_of_kind(len(resident.layers), resident.layers[0].count, "prune", space="logits")
    export_model(resident, edit, place / "stock", CARD, "stock")
    tokens = torch.randint(4, COMMON["vocab_size"], (2, 31), generator=torch.Generator().manual_seed(0))

    def compared(edit: Edit, name: str) -> str:
        expected = logits(resident, edit, tokens)
        with Outsider(place, python) as outsider:
            try:
                ((found, _, _),) = outsider.load([place / name], tokens.tolist(), [], place / "modules")
            except AssertionError as error:
                said = [line for line in str(error).splitlines() if "Error" in line]
                return said[-1][:90]
        return f"{(torch.tensor(found) - expected).abs().max() / expected.abs().max():.1e}"

    return compared(edit, "stock"), compared(IdentityEdit(), "source")


def main() -> None:
    """Print the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--stock", action="store_true", help="have transformers read stock checkpoints")
    parser.add_argument("python", help="Python of an environment that has vLLM or transformers")
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), help="model types; all by default")
    asked = parser.parse_args()
    print("| family | pruned | source |\n|---|---|---|")
    for variant in asked.variants:
        with tempfile.TemporaryDirectory() as place:
            cells = (stock_row if asked.stock else row)(variant, asked.python, Path(place))
            print(f"| `{variant}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
