"""The settings of a profile, and the messages between the profiler and its processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import Field, computed_field

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import Device, ModelConfig

NEW_TOKENS = 32
"""Decoding steps of profiles where nothing else is asked for."""
_MOST_PROMPT_TOKENS = 512

LoadedDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A checkpoint to be profiled.

    Attributes:
        label: Name of the model as the user gave it.
        path: Local folder or hub id.
        revision: Hub revision; None for the default branch.
        device_map: `transformers` device map to spread the model over several GPUs.
        trust_remote_code: Allow modelling code in the checkpoint to run.
    """

    label: str
    path: str
    revision: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def full(cls, label: str, model: ModelConfig) -> Self:
        """Return the unedited model of a search's settings."""
        # Where a search keeps original experts elsewhere, one GPU may not hold the whole model: it is spread over all.
        spread = "balanced" if model.originals != "device" else model.device_map
        return cls(label, model.path, model.revision, spread, model.trust_remote_code)


def usual_prompt_tokens(positions: int) -> int:
    """Length of the prompts that models are timed with where none is given, by their maximum number of positions."""
    return max(1, min(_MOST_PROMPT_TOKENS, positions // 2))


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """The prompts of a task split.

    Attributes:
        task, split: Names of the task and the split.
        tokens: Token ids of at least one prompt, sorted by length.
    """

    task: str
    split: str
    tokens: Annotated[tuple[Tokens, ...], Field(exclude=True)] = field(repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        """Number of prompts."""
        return len(self.tokens)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt."""
        return len(self.tokens[0])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return len(self.tokens[-1])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def mean(self) -> int:
        """Mean number of tokens per prompt, rounded."""
        return round(sum(map(len, self.tokens)) / len(self.tokens))

    def batch(self, size: int) -> tuple[Tokens, ...]:
        """Return `size` prompts at even quantiles of length, so that a batch of one has the median length."""
        count = len(self.tokens)
        return tuple(self.tokens[(2 * index + 1) * count // (2 * size)] for index in range(size))


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Settings of a profile, the same for all of its models.

    Attributes:
        batch_sizes: Numbers of sequences per batch, ascending.
        prompt_tokens: Tokens per prompt, for a task's prompts their mean; also the context for FLOPs per token.
        new_tokens: Decoding steps after the prompt.
        repeats: Timed runs per batch size.
        device: Device of the models; `auto` is CUDA if there is a device.
        dtype: Parameter dtype; `auto` is each checkpoint's own.
        threads: Intra-op threads of torch on the CPU; None for torch's default.
        apart: Load one model at a time, so that runs aren't interleaved. None does so unless there is ample memory.
        prompts: Prompts of a task; None for arbitrary tokens.
    """

    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    device: Device = "auto"
    dtype: LoadedDtype = "auto"
    threads: int | None = None
    apart: bool | None = None
    prompts: TaskPrompts | None = None

    def request(self, size: int) -> MeasureRequest:
        """Return the measurement for a batch size."""
        prompts = () if self.prompts is None else self.prompts.batch(size)
        return MeasureRequest(size, self.prompt_tokens, self.new_tokens, prompts)

    def turns(self, count: int) -> Iterator[Sequence[int]]:
        """Order of `count` models in each repeat. It alternates, so that changes in the machine's speed affect all."""
        for repeat in range(self.repeats):
            yield range(count)[:: 1 if repeat % 2 == 0 else -1]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Request to load a model."""

    model: ProfiledModel
    settings: ProfileSettings


@dataclass(frozen=True, slots=True)
class LoadReply:
    """A loaded model's costs (`moevolve.workers.profiling.costs.ModelCosts`) and the settings that it runs with.

    Attributes:
        free_bytes: Free memory of the model's devices, or of the host, in bytes.
    """

    parameters: int
    active_parameters: int
    weight_bytes: int
    linear_flops: int
    attention_flops: int
    model_type: str
    dtype: str
    device: str
    device_name: str
    threads: int
    attention: str
    experts: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Request to run a batch once: one pass over the prompts, then `new_tokens` passes of one position each.

    Attributes:
        batch_size: Number of prompts.
        prompt_tokens: Tokens per prompt, if these are arbitrary.
        new_tokens: Number of decoding steps.
        prompts: Token ids of the prompts; empty for arbitrary ones.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    prompts: tuple[Tokens, ...] = field(default=(), repr=False)

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts, without padding."""
        return sum(map(len, self.prompts)) if self.prompts else self.batch_size * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class MeasureReply:
    """Seconds of the pass over the prompts and of all decoding steps, and the peak memory.

    `peak_bytes` is None if it can't be measured; see `moevolve.workers.profiling.memory`.
    """

    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int | None
