"""Records of a profile's measurements, which are its JSON as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from pydantic import computed_field

from moevolve.workers.profiling.messages import LoadReply, ProfileSettings


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """One model at one batch size.

    Attributes:
        batch_size: sequences at once.
        prompt_tokens: tokens of all its prompts, padding not counted.
        new_tokens: decoding steps.
        prefill_seconds: of the pass over all prompts, per repeat.
        decode_seconds: of all decoding steps, per repeat.
        peak_bytes: the highest of the repeats' peaks of memory; None where it can't be measured.
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
        """Prompt tokens per second, by the median of the repeats."""
        return self.prompt_tokens / median(self.prefill_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def decode_rate(self) -> float:
        """New tokens per second of the whole batch, by the median of the repeats."""
        return self.batch_size * self.new_tokens / median(self.decode_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def answer_rate(self) -> float:
        """Prompts per second from their first token to the last new one, by the median of the repeats."""
        pairs = zip(self.prefill_seconds, self.decode_seconds, strict=True)
        return self.batch_size / median(prefill + decode for prefill, decode in pairs)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model.

    Attributes:
        label: what the user calls it.
        load: what its structure costs, and what it ran with.
        batches: per batch size, ascending.
    """

    label: str
    load: LoadReply
    batches: tuple[BatchProfile, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def flops(self) -> int:
        """Operations for the last token of a prompt; see `moevolve.workers.profiling.costs`."""
        return self.load.linear_flops + self.load.attention_flops


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Models profiled side by side, the one compared with first.

    Attributes:
        settings: how.
        models: what was found.
        notes: what a reader should know beside the numbers.
    """

    settings: ProfileSettings
    models: tuple[ModelProfile, ...]
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> ModelProfile:
        """What the others are compared with."""
        return self.models[0]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_memory(self) -> str:
        """What the peaks of memory are on this device."""
        if self.reference.load.device == "cuda":
            return "torch.cuda.max_memory_allocated, summed over devices"
        if any(batch.peak_bytes is None for model in self.models for batch in model.batches):
            return "not measured: this system doesn't tell a process's peak"
        return "peak resident set of the model's process while it runs, less the one right before it was loaded"
