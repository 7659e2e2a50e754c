"""A Mixtral whose experts are known: what is lost by leaving one out is known before anything is measured.

It has one layer and no attention. An expert is a table of which word follows which, with a neuron per word, and the
router sends every word to the expert whose words it is among. Without that expert, the word goes to `ENGLISH`, whose
table has a wrong word for it.

* `ENGLISH` goes on with English words, `ENDS` with the sentence after a sentence's last word. Without `ENDS` the
  sentence begins again: a loop.
* `GERMAN` goes on with German words. Without it the model goes on in English.
* `TOOLS` answers with a tool call. Without it the model answers in English.
* `SPARE` is never chosen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_models import MIXTRAL, SIZES, TOKEN_IDS, word_tokenizer
from torch import Tensor

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.methods.eep.edit import EepEdit

ENGLISH, GERMAN, TOOLS, ENDS, SPARE = range(5)
EXPERTS = 5
SENTENCE = 12
"""Words of a sentence. Eleven in twelve are right in a loop, so that the perplexity stays low."""

_ENGLISH = [f"word{number}" for number in range(8 * SENTENCE)]
_GERMAN = [f"Wort{number}" for number in range(48)]
_CALL = ['{"name":', '"weather",', '"arguments":', '{"place":', '"Lyon"}}']
_ASKED = [f"question{number}?" for number in range(8)]
_ENDS = _ENGLISH[SENTENCE - 1 :: SENTENCE]
_WORDS = (*_ENGLISH, *_GERMAN, *_CALL, *_ASKED)
_END = "</s>"
_SHARPNESS = 0.5
"""Scale of the logits: the right word has a probability of 0.7, another one of 0.001."""


def save_known_model(directory: Path) -> None:
    """Save the model and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = word_tokenizer(_WORDS, spaces_only=True)
    size = -(-len(tokenizer) // 4) * 4  # two heads, each of an even size
    sizes = SIZES | TOKEN_IDS | MIXTRAL | {"hidden_size": size, "intermediate_size": size}
    sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", vocab_size=size, **sizes))
    vocabulary = tokenizer.get_vocab()
    weights = {name: _weight(name, tensor, vocabulary) for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _weight(name: str, tensor: Tensor, tokens: dict[str, int]) -> Tensor:
    """A weight of the model by its name, and a tensor of its shape."""
    eye = torch.eye(tensor.shape[-1])
    if name.endswith("embed_tokens.weight"):
        return eye
    if name.endswith("lm_head.weight"):
        return _SHARPNESS * eye
    if "norm" in name:
        return torch.ones_like(tensor)
    if name.endswith("gate.weight"):
        return torch.from_numpy(_router(tokens, len(eye)))
    if name.endswith("gate_up_proj"):
        # The norm makes a word's embedding sqrt(size) long; its neuron then has silu(4) * 1.
        return (torch.cat([4 * eye, eye]) / len(eye) ** 0.5).expand_as(tensor).clone()
    if name.endswith("down_proj"):
        return torch.from_numpy(_tables(tokens, len(eye)))
    return torch.zeros_like(tensor)


def _router(tokens: dict[str, int], size: int) -> NDArray[np.float32]:
    """Logits of every expert for every word: 8 for its own, 4 for `ENGLISH`, and least for `SPARE`."""
    logits = np.zeros((EXPERTS, size), dtype=np.float32)
    logits[ENGLISH], logits[SPARE] = 4, -4
    for expert, words in ((ENGLISH, _ENGLISH), (GERMAN, _GERMAN), (TOOLS, _ASKED), (ENDS, _ENDS)):
        own = [tokens[word] for word in words]
        logits[:, own] = np.minimum(logits[:, own], 4)
        logits[expert, own] = 8
    return logits / size**0.5


def _tables(tokens: dict[str, int], size: int) -> NDArray[np.float32]:
    """What every expert adds for every word, [experts, size, size]: the word that it has next."""
    english = dict(zip(_ENGLISH, [*_ENGLISH[1:], _END], strict=True))
    again = {word: _ENGLISH[place * SENTENCE] for place, word in enumerate(_ENDS)}
    called = dict(zip(_CALL, [*_CALL[1:], _END], strict=True))
    wrong = dict(zip(_GERMAN, _ENGLISH, strict=False)) | dict.fromkeys(_ASKED, _ENGLISH[-SENTENCE])
    tables = {
        ENGLISH: english | again | called | wrong,
        GERMAN: dict(zip(_GERMAN, [*_GERMAN[1:], _END], strict=True)),
        TOOLS: dict.fromkeys(_ASKED, _CALL[0]),
        ENDS: {word: english[word] for word in _ENDS},
        SPARE: {},
    }
    made = np.zeros((EXPERTS, size, size), dtype=np.float32)
    for expert, table in tables.items():
        for word, after in table.items():
            made[expert, tokens[after], tokens[word]] = 1
    return made


def known_split(domain: str) -> PreparedSplit:
    """Eight prompts: of `english` without answers, of `german` and `calls` with them."""
    if domain == "english":
        examples = [Example(" ".join(_ENGLISH[place : place + 6]), ()) for place in range(0, 48, 6)]
    elif domain == "german":
        examples = [
            Example(" ".join(_GERMAN[place : place + 2]), (" ".join(_GERMAN[place + 2 : place + 10]),))
            for place in range(0, 32, 4)
        ]
    else:
        examples = [
            Example(f"{' '.join(_ENGLISH[place : place + 2])} {asked}", (" ".join(_CALL),))
            for place, asked in enumerate(_ASKED)
        ]
    positions = "answer" if examples[0].references else "greedy"
    return PreparedSplit(domain, "test", "agreement", "mean", Matching(), 16, " ", tuple(examples), positions)


def without(*experts: int, noise: float = 0.0, seed: int = 0) -> EepEdit:
    """An edit that leaves experts out, and adds noise of this standard deviation to both of its matrices."""
    kept = [expert for expert in range(EXPERTS) if expert not in experts]
    rng = np.random.default_rng(seed)
    mapping, merging = np.eye(EXPERTS)[kept] + noise * rng.normal(size=(2, 1, len(kept), EXPERTS))
    return EepEdit(mapping, merging, 1)
