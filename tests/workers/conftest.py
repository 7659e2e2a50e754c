"""Tiny random checkpoints of every family, and models and edits on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from edit_checks import Residents
from family_samples import COMMON, edit_of_kind, randomise
from family_samples import SETTINGS as MORE_SETTINGS
from plain_families import plain_family_logits
from tiny_models import word_tokenizer
from torch import Tensor, nn

from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.registry import register_class
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "over",
    "dog",
    "Question",
    "Answer",
    "which",
    "is",
    "larger",
    ":",
    ".",
    "a",
    "b",
)
VOCABULARY = 97
EXPERTS = 6
MIXTRAL: dict[str, Any] = {"intermediate_size": 24, "num_local_experts": EXPERTS}
QWEN: dict[str, Any] = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": EXPERTS}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL | {"tie_word_embeddings": True},
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    "qwen3_moe": QWEN | {"norm_topk_prob": True, "head_dim": 8},
    "olmoe": {"intermediate_size": 24, "num_experts": EXPERTS},
    "llama": {"intermediate_size": 48},
    "phi": {"intermediate_size": 48, "partial_rotary_factor": 0.5},
    "qwen2": {"intermediate_size": 48},
    **MORE_SETTINGS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.25},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a tiny random checkpoint of a family, created once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            config = AutoConfig.for_model(family.split("-", maxsplit=1)[0], **(COMMON | SETTINGS[family]))
            register_class(config)
            with torch.random.fork_rng():
                torch.manual_seed(7)
                model = AutoModelForCausalLM.from_config(config)
                if family in MORE_SETTINGS:
                    for name, tensor in model.state_dict().items():
                        randomise(name, tensor)
                for name, parameter in model.named_parameters():
                    if (
                        ".mlp.gate." in name and family not in MORE_SETTINGS
                    ):  # some families start their routers at zero
                        nn.init.normal_(parameter, std=0.4)
                    elif family in ("opt", "phi", "qwen2") and name.endswith(".bias"):  # these start at zero
                        nn.init.normal_(parameter, std=0.2)
            model.save_pretrained(directory)
            word_tokenizer(WORDS).save_pretrained(directory)
            made[family] = directory
        return made[family]

    return make


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def plain_logits() -> Callable[..., Tensor]:
    """See `plain_family_logits`."""
    return plain_family_logits


@pytest.fixture(scope="session")
def model_config(checkpoint: Callable[[str], Path]) -> Callable[..., ModelConfig]:
    def make(family: str, **settings: str) -> ModelConfig:
        return ModelConfig(path=str(checkpoint(family)), device="cpu", **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def resident(model_config: Callable[..., ModelConfig]) -> Residents:
    """Return a resident model by family and settings, shared between the tests of a file."""
    loaded: dict[tuple[str, str], ResidentModel] = {}

    def get(family: str, **settings: str) -> ResidentModel:
        key = (family, repr(sorted(settings.items())))
        if key not in loaded:
            loaded[key] = ResidentModel.load(model_config(family, **settings))
        assert isinstance(loaded[key].applied, IdentityEdit)
        return loaded[key]

    return get


@pytest.fixture(scope="session")
def moe_layers() -> Callable[[str], int]:
    return lambda family: 2 if family == "qwen2_moe" else 3


@pytest.fixture(scope="session")
def make_edit(moe_layers: Callable[[str], int]) -> Callable[..., EepEdit]:
    """See `edit_of_kind`."""

    def make(
        family: str, kind: str, retained: int = 4, active: int = 2, space: str = "probs", seed: int = 0
    ) -> EepEdit:
        return edit_of_kind(moe_layers(family), EXPERTS, kind, retained, active, space, seed)

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word `w4` ... `w96` (id 4 ... 96), words apart by spaces; adds no special tokens by itself."""
    return word_tokenizer([f"w{i}" for i in range(4, VOCABULARY)], spaces_only=True)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Create a tiny random model of a family in float32; `settings` change its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(family: str = "mixtral", seed: int = 11, **settings: object) -> PreTrainedModel:
        config = AutoConfig.for_model(family.split("-", maxsplit=1)[0], **(COMMON | SETTINGS[family] | settings))
        register_class(config)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).eval()
            if family in MORE_SETTINGS:
                for name, tensor in model.state_dict().items():
                    randomise(name, tensor)
            return model

    return make
