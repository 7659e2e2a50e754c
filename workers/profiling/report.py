"""The settings of a profile, what its processes reply, and its results, whose JSON these records are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Literal, Self

from pydantic import Field, computed_field

from moevolve.evaluators.records import short_repr
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import Device, Dtype, ModelConfig

# Default number of decoding steps.
NEW_TOKENS = 32
_MOST_PROMPT_TOKENS = 512


class ProfileError(RuntimeError):
    """The process of a model ended, or failed in an unexpected way."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A checkpoint to be profiled, labelled as the user named it; for the other fields see `ModelConfig`."""

    label: str
    path: str
    revision: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def full(cls, label: str, model: ModelConfig) -> Self:
        """Return the unedited model of a search's settings."""
        # If a search keeps original experts elsewhere, one GPU may not hold the whole model, so it is spread over all.
        spread = "balanced" if model.expert_offload != "device" else model.device_map
        return cls(label, model.path, model.revision, spread, model.trust_remote_code)


def usual_prompt_tokens(positions: int) -> int:
    """Default length of prompts, by the maximum number of positions of the model."""
    return max(1, min(_MOST_PROMPT_TOKENS, positions // 2))


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """The prompts of a task split.

    Attributes:
        tokens: Token ids of at least one prompt, sorted by length.
        shortest, longest, mean: Numbers of tokens per prompt; the mean is rounded.
    """

    task: str
    split: str
    tokens: Annotated[tuple[Tokens, ...], Field(exclude=True)] = field(repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        return len(self.tokens)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shortest(self) -> int:
        return len(self.tokens[0])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def longest(self) -> int:
        return len(self.tokens[-1])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def mean(self) -> int:
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
        prompt_tokens: Tokens per prompt, for a task's prompts their mean.
        dtype: Parameter dtype; `auto` is each checkpoint's own.
        threads: Intra-op threads of torch on the CPU; None for torch's default.
    """

    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    timed_runs: int
    device: Device = "auto"
    dtype: Literal["auto"] | Dtype = "auto"
    threads: int | None = None
    prompts: TaskPrompts | None = None

    def batch_tokens(self, size: int) -> int:
        """Return the number of prompt tokens in a batch of `size` sequences, without padding."""
        return size * self.prompt_tokens if self.prompts is None else sum(map(len, self.prompts.batch(size)))

    def turns(self, count: int) -> Iterator[Sequence[int]]:
        """Order of `count` models in each run. It alternates, so that changes in the machine's speed affect all."""
        for repeat in range(self.timed_runs):
            yield range(count)[:: 1 if repeat % 2 == 0 else -1]


@dataclass(frozen=True, slots=True)
class LoadReply:
    """The size of a loaded model and the settings that it runs with.

    Attributes:
        active_parameters: See `moevolve.workers.profiling.costs.active_parameters`.
        weight_bytes: Bytes of parameters and buffers as loaded, counting tied tensors once.
        free_bytes: Free memory of the model's devices, or of the host.
    """

    parameters: int
    active_parameters: int
    weight_bytes: int
    model_type: str
    dtype: str
    device: str
    device_name: str
    threads: int
    attention: str
    experts: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MeasureReply:
    """Times and memory of one run: a pass over a batch's prompts, and decoding steps of one token per sequence.

    Attributes:
        peak_bytes: Peak memory; None if it can't be measured.
    """

    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Measurements of one model at one batch size.

    Attributes:
        prompt_tokens: Tokens of all prompts, without padding.
        prefill_seconds, decode_seconds: Time of the pass over all prompts and of all decoding steps, by repeat.
        peak_bytes: Peak memory over all timed runs; None if it can't be measured.
        prefill_rate: Prompt tokens per second; this and the other rates are medians over the timed runs.
        decode_rate: New tokens per second of the whole batch.
        answer_rate: Prompts per second, including prefill and decoding.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: tuple[float, ...] = field(repr=False)
    decode_seconds: tuple[float, ...] = field(repr=False)
    peak_bytes: int | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / median(self.prefill_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def decode_rate(self) -> float:
        return self.batch_size * self.new_tokens / median(self.decode_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def answer_rate(self) -> float:
        return self.batch_size / median(map(sum, zip(self.prefill_seconds, self.decode_seconds, strict=True)))


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Measurements of one model."""

    label: str
    load: LoadReply
    batches: tuple[BatchProfile, ...]


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Measurements of several models.

    Attributes:
        models: Ratios are relative to the first.
    """

    __repr__ = short_repr

    settings: ProfileSettings
    models: tuple[ModelProfile, ...]
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> ModelProfile:
        return self.models[0]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_memory(self) -> str:
        if self.reference.load.device == "cuda":
            return "torch.cuda.max_memory_allocated, summed over devices"
        if any(batch.peak_bytes is None for model in self.models for batch in model.batches):
            return "not measured: this system doesn't tell a process's peak"
        return "peak resident set of the model's process while it runs, less the one right before it was loaded"
