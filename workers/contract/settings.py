"""Settings of model loading and evaluation. Those that can change a score are part of fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, MinLen

# Makes pydantic refuse unknown keys.
_STRICT = {"extra": "forbid"}
_MOST_TOKENS = 1_000_000_000

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
# Place of the original experts; see `ModelConfig`.
ExpertOffload = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The checkpoint that is searched, and how a worker loads it.

    Attributes:
        path: Local directory or hub id of a `transformers` checkpoint.
        revision: Hub revision; None for the default branch.
        dtype: Parameter dtype on the worker: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own
            (`bfloat16` for a quantised one).
        device: `cpu`, `cuda`, or `auto` for CUDA if the worker has a GPU, else the CPU.
        device_map: `transformers` device map (`auto`, `balanced` ...) to spread one model over several GPUs.
        expert_offload: Place of the original experts: the `device`, or pinned `host` memory if the device can't hold
            them in addition to the experts that a candidate runs on, or the `disk` if the host can't hold them either.
            As many layers as fit then keep their current experts on the device; those of other layers are copied from
            the host, or read from the checkpoint's files, in every forward pass.
        trust_remote_code: Allow modelling code in the checkpoint to run.
        own_dtype: Dtype that `auto` stands for. Setting up a search records it, like `revision`, for reports that are
            made without the checkpoint; loading a model reads it from the checkpoint instead.

    Raises:
        ValueError: `expert_offload` and `device_map` are both set.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str
    revision: str | None = None
    dtype: Literal["auto"] | Dtype = "auto"
    device: Device = "auto"
    device_map: str | None = None
    expert_offload: ExpertOffload = "device"
    trust_remote_code: bool = False
    own_dtype: Dtype | None = None

    @property
    def parameter_dtype(self) -> str:
        """Parameter dtype, or `auto` if it hasn't been read from the checkpoint yet."""
        return self.own_dtype or "auto" if self.dtype == "auto" else self.dtype

    def __post_init__(self) -> None:
        if self.expert_offload != "device" and self.device_map is not None:
            raise ValueError(
                f"expert_offload: {self.expert_offload} and device_map exclude each other; use one of them"
            )


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """vLLM as the generator of answers, installed in an environment of its own; see `moevolve.workers.vllm`.

    Attributes:
        python: Python executable of the environment that vLLM is installed in.
        options: Arguments of `vllm.LLM`, such as `gpu_memory_utilization` and `tensor_parallel_size`.
        folder: Directory for the weights of the candidate that vLLM loads; None for the system's temporary one.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    python: Annotated[str, MinLen(1)]
    options: Mapping[str, object] = field(default_factory=dict)
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How prompts are batched and run.

    Attributes:
        batch_tokens: Upper bound on the tokens of one forward pass, in which a shared prefix counts once.
        threads: Intra-op threads of torch per worker. The number is fixed, so that scores don't depend on the machine.
        max_prompt_tokens: Maximum length of a prompt; longer ones lose their beginning, except for a
            beginning-of-sequence token. None keeps prompts whole, up to the model's context.
        chat_template: Chat template around prompts: `auto` for the tokenizer's own template if it has one, `none`, or
            the name of a template (see `moevolve.workers.engine.chat`).
        vllm: vLLM to generate answers with; None to generate them with `transformers`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    batch_tokens: Annotated[int, Ge(1), Le(_MOST_TOKENS)] = 4096
    threads: Annotated[int, Ge(1), Le(4096)] = 1
    max_prompt_tokens: Annotated[int, Ge(1), Le(_MOST_TOKENS)] | None = None
    chat_template: Annotated[str, MinLen(1)] = "auto"
    vllm: VllmConfig | None = None


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """Optimisations that don't change results. Searches use all of them; benchmarks turn them off to measure them.

    They aren't part of any fingerprint. On a CPU results are equal by construction (see `moevolve.kernels.products`),
    on other devices up to the last digits.

    Attributes:
        draft: Read greedy tokens off the pass over the gold answer instead of decoding them one by one.
        prefixes: Run prefixes that sequences share once (`moevolve.workers.engine.columns`).
    """

    draft: bool = True
    prefixes: bool = True


ALL_SHORTCUTS = Shortcuts()


# Bytes from which on a block of host memory goes back to the system when a worker process frees it.
LARGE_BLOCK = 32 << 20
WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(LARGE_BLOCK),
        "TOKENIZERS_PARALLELISM": "false",
    }
)
"""Environment variables of a worker process, which must be set before it starts.

A forward pass allocates and frees the same activations again and again. By default glibc returns large blocks to the
kernel at once, so every pass pays for page faults and zeroing. With these thresholds freed memory stays with the
process, except for blocks of `LARGE_BLOCK` bytes: those are few, and with states that live long between them it
would grow to 1.4 times a repair's own memory. Other C libraries ignore the variables.
"""


# Chat templates by name, for tokenizers without a template of that name. `mixtral` is the one that the authors of EEP
# use for Mixtral-8x7B-Instruct; unlike Mixtral's own it has no white space around `[INST]` and `[/INST]`.
PACKAGED_TEMPLATES = {
    "mixtral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
        "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no system prompt') }}{% endif %}{% endfor %}"
    ),
}


def engine_fingerprint(model: ModelConfig, engine: EngineConfig) -> str:
    """SHA-256 (hex) of the settings that can change the last digits of a score, without the checkpoint itself."""
    # The tokenizer's own chat template and dtype are part of the checkpoint; the text of a packaged template isn't.
    settings = asdict(model) | asdict(engine)
    for where in ("path", "revision", "own_dtype"):
        del settings[where]
    if engine.vllm is not None:
        settings["vllm"] = dict(engine.vllm.options)
    settings["packaged"] = PACKAGED_TEMPLATES.get(engine.chat_template)
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
