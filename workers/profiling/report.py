"""Records of a profile's measurements, which are its JSON as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from pydantic import computed_field

from moevolve.workers.profiling.messages import LoadReply, ProfileSettings


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Measurements of one model at one batch size.

    Attributes:
        batch_size: Number of sequences per batch.
        prompt_tokens: Tokens of all prompts, without padding.
        new_tokens: Number of decoding steps.
        prefill_seconds: Time of the pass over all prompts, for every repeat.
        decode_seconds: Time of all decoding steps, for every repeat.
        peak_bytes: Peak memory over all repeats; None if it can't be measured.
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
        """Prompt tokens per second, median over the repeats."""
        return self.prompt_tokens / median(self.prefill_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def decode_rate(self) -> float:
        """New tokens per second of the whole batch, median over the repeats."""
        return self.batch_size * self.new_tokens / median(self.decode_seconds)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def answer_rate(self) -> float:
        """Prompts per second, including prefill and decoding, median over the repeats."""
        pairs = zip(self.prefill_seconds, self.decode_seconds, strict=True)
        return self.batch_size / median(prefill + decode for prefill, decode in pairs)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Measurements of one model.

    Attributes:
        label: Name of the model as the user gave it.
        load: Costs of the model and the settings that it ran with.
        batches: Measurements by batch size, ascending.
        score: Stored score on the prompts' task and split, from 0 to 1; None for arbitrary prompts, folders, and models
            that weren't evaluated on them.
    """

    label: str
    load: LoadReply
    batches: tuple[BatchProfile, ...]
    score: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def flops(self) -> int:
        """FLOPs for the last token of a prompt; see `moevolve.workers.profiling.costs`."""
        return self.load.linear_flops + self.load.attention_flops


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Measurements of several models.

    Attributes:
        settings: Settings of the profile.
        models: Measurements of the models; ratios are relative to the first.
        notes: Remarks for readers.
    """

    settings: ProfileSettings
    models: tuple[ModelProfile, ...]
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> ModelProfile:
        """The model that the others are compared with."""
        return self.models[0]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_memory(self) -> str:
        """How the peak memory was measured, as text."""
        if self.reference.load.device == "cuda":
            return "torch.cuda.max_memory_allocated, summed over devices"
        if any(batch.peak_bytes is None for model in self.models for batch in model.batches):
            return "not measured: this system doesn't tell a process's peak"
        return "peak resident set of the model's process while it runs, less the one right before it was loaded"
