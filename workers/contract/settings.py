"""Frozen settings of model loading and evaluation; those that can change a score are fingerprinted."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, MinLen

_STRICT = {"extra": "forbid"}
"""For configurations that are read with pydantic: unknown keys are refused."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint is searched and how a worker holds it.

    Attributes:
        path: local directory or hub id of a `transformers` checkpoint.
        revision: hub revision, if any.
        dtype: parameter dtype on the worker: `auto` for the checkpoint's own (of a quantised one, `bfloat16`),
            `float32`, `bfloat16` or `float16`.
        device: `auto` (CUDA when the worker was given a GPU, else CPU), `cpu` or `cuda`.
        device_map: `transformers` device map (`auto`, `balanced` ...) to spread one model over several GPUs.
        originals: where the original experts stay: on the `device`, or in pinned `host` memory when the device has no
            room for them beside those that candidates run on. As many layers as fit keep what they run on, originals or
            candidates' experts, on the device; the others' is copied from the host in every pass.
        experts_implementation: `transformers` experts backend (`grouped_mm`, `batched_mm`, `eager`).
        attn_implementation: `transformers` attention backend (`sdpa`, `eager` ...); a family whose attention has no
            sdpa form runs `eager` in its place.
        trust_remote_code: whether modelling code in the checkpoint may run.
        own_dtype: what `dtype: auto` stands for. Setting up a search fills it in for tables that are made without the
            checkpoint, like `revision`; whatever loads the model asks the checkpoint.

    Raises:
        ValueError: settings exclude each other.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str
    revision: str | None = None
    dtype: Literal["auto"] | Dtype = "auto"
    device: Device = "auto"
    device_map: str | None = None
    originals: Literal["device", "host"] = "device"
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    own_dtype: Dtype | None = None

    @property
    def parameter_dtype(self) -> str:
        """What parameters are held in; `auto` as long as nobody has asked the checkpoint."""
        return self.own_dtype or "auto" if self.dtype == "auto" else self.dtype

    def __post_init__(self) -> None:
        if self.originals == "host" and self.device_map is not None:
            raise ValueError("originals: host and device_map exclude each other; use one of them")


MatmulBackend = Literal["auto", "torch", "onednn"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How prompts are batched and run.

    Attributes:
        batch_tokens: upper bound on tokens in one forward pass; what its prompts begin alike with counts once.
        threads: torch intra-op threads per worker, a fixed number: a score doesn't depend on the machine's load.
        max_prompt_tokens: longer prompts keep their head and their last `tail_tokens` tokens; None keeps all.
        tail_tokens: how many closing tokens survive the truncation (question and `Answer:` stand at the end).
        chat_template: what prompts are wrapped in: `auto` for the tokenizer's own chat template, if it has one, `none`
            for nothing, or a name (see `moevolve.workers.engine.chat`).
        date: what chat templates that print today's date are told instead, so that a prompt is the same on every day.
        matmul_backend: library for float32 matrix products on a CPU: `torch` (MKL), `onednn`, or `auto`, the one that
            is faster on this make of processor (see `moevolve.kernels.products`).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    batch_tokens: Annotated[int, Ge(1)] = 4096
    threads: Annotated[int, Ge(1)] = 1
    max_prompt_tokens: Annotated[int, Ge(1)] | None = None
    tail_tokens: Annotated[int, Ge(0)] = 64
    chat_template: Annotated[str, MinLen(1)] = "auto"
    date: dt.date = dt.date(2025, 1, 1)
    matmul_backend: MatmulBackend = "auto"

    def __post_init__(self) -> None:
        tail, limit = self.tail_tokens, self.max_prompt_tokens
        if tail < 0 or (limit is not None and tail >= limit):
            raise ValueError(
                f"tail_tokens {tail} must be {'0 or more' if tail < 0 else f'below max_prompt_tokens {limit}'}"
            )


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """Ways to compute less for the same result; on unless somebody wants to see what they save.

    None of them changes a score, so they are no part of any fingerprint. On a CPU that is so by construction (see
    `moevolve.kernels.products`), elsewhere up to last digits; searches always take all of them.

    Attributes:
        draft: read greedy tokens off the pass over the gold answer, instead of decoding all of them step by step.
        lean: leave out feed-forward work that nobody reads (`moevolve.workers.engine.lean`).
        prefixes: run beginnings that sequences have in common once (`moevolve.workers.engine.columns`).
    """

    draft: bool = True
    lean: bool = True
    prefixes: bool = True


ALL_SHORTCUTS = Shortcuts()


WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
        "TOKENIZERS_PARALLELISM": "false",
    }
)
"""Environment of a worker process; read when it starts, so it must be set by whoever starts it.

A forward pass allocates and frees the same activations again and again. glibc by default gives large blocks back to
the kernel at once, and every following pass pays for page faults and zeroing. With both thresholds out of reach freed
memory stays with the process. Other C libraries ignore the variables. `configure_runtime` sets the threads.
"""


PACKAGED_TEMPLATES = {
    "mixtral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
        "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no system prompt') }}{% endif %}{% endfor %}"
    ),
}
"""Chat templates by name, for tokenizers that have none of that name. `mixtral` is what the authors of EEP wrap prompts
in (their released configurations of Mixtral-8x7B-Instruct): no white space at the marks; Mixtral's own has some."""


def engine_fingerprint(model: ModelConfig, engine: EngineConfig) -> str:
    """SHA-256 (hex) of the settings that can change the last digits of a score, the checkpoint itself excepted.

    With a chat template that comes with the project goes its text; a tokenizer's own is part of the checkpoint, and so
    is the dtype that `auto` stands for.
    """
    settings = asdict(model) | asdict(engine)
    for where in ("path", "revision", "own_dtype"):
        del settings[where]
    settings["packaged"] = PACKAGED_TEMPLATES.get(engine.chat_template)
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
