"""Tiny random checkpoints of every family, and models and edits on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from edit_checks import Residents
from families import random_model
from plain_families import plain_family_logits
from tiny_models import word_tokenizer
from torch import Tensor

from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = ["the", "quick", "brown", "fox", "over", "dog", "Question", "Answer", "which", "is", "larger"]
WORDS += [":", ".", "a", "b"]
VOCABULARY = 97


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a tiny random checkpoint of a family, created once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            random_model(family, seed=7).save_pretrained(directory)
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
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word `w4` ... `w96` (id 4 ... 96), words apart by spaces; adds no special tokens by itself."""
    return word_tokenizer([f"w{i}" for i in range(4, VOCABULARY)], spaces_only=True)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Create a tiny random model of a family in float32; `settings` change its config."""

    def make(family: str = "mixtral", seed: int = 11, **settings: object) -> PreTrainedModel:
        model: PreTrainedModel = random_model(family, seed, **settings)
        return model

    return make
