"""What a profile is asked for and finds: what the profiler and its processes send each other, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, computed_field

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import Device

LoadedDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A checkpoint to be profiled.

    Attributes:
        label: what the user calls it.
        path: folder or hub id.
        revision: hub revision, if any.
        device_map: `transformers` device map, to spread it over several GPUs.
        trust_remote_code: whether modelling code in the checkpoint may run.
    """

    label: str
    path: str
    revision: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """Prompts of a task split, as the models are given them.

    Attributes:
        task, split: whose.
        tokens: per prompt, from the shortest to the longest; at least one.
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
        """Tokens of a prompt, on average, rounded."""
        return round(sum(map(len, self.tokens)) / len(self.tokens))

    def batch(self, size: int) -> tuple[Tokens, ...]:
        """As many prompts, at even quantiles of length: one is the median, many are long and short as all are."""
        count = len(self.tokens)
        return tuple(self.tokens[(2 * place + 1) * count // (2 * size)] for place in range(size))


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """How models are profiled; the same for all of one profile.

    Attributes:
        batch_sizes: sequences at once, ascending.
        prompt_tokens: tokens of every prompt, or of a task's on average; also the context of the operations per token.
        new_tokens: decoding steps after the prompt.
        repeats: timed runs per batch size.
        device: where; `auto` is CUDA if there is a device.
        dtype: of the parameters; `auto` is each checkpoint's own.
        threads: of torch's operators on the CPU; None leaves torch's default.
        apart: hold one model in memory at a time, so that runs aren't interleaved; None does so unless there is ample
            room for all.
        prompts: of a task; None takes arbitrary tokens.
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
        """What to run at a batch size."""
        prompts = () if self.prompts is None else self.prompts.batch(size)
        return MeasureRequest(size, self.prompt_tokens, self.new_tokens, prompts)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Load a model; see `ProfiledModel` and `ProfileSettings`. `context` is for the operations of attention."""

    path: str
    revision: str | None
    device_map: str | None
    trust_remote_code: bool
    device: Device
    dtype: LoadedDtype
    threads: int | None
    context: int


@dataclass(frozen=True, slots=True)
class LoadReply:
    """A loaded model: `moevolve.workers.profiling.costs.ModelCosts`, what it runs with, and the room beside it.

    Attributes:
        free_bytes: of the devices that it runs on, or of host memory; None where the system can't tell.
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
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Run a batch of prompts once: one pass over all of them, then `new_tokens` passes of one position each.

    Attributes:
        batch_size: how many prompts.
        prompt_tokens: of each, if they are arbitrary.
        new_tokens: how many passes follow.
        prompts: their tokens; empty for arbitrary ones.
    """

    batch_size: int
    prompt_tokens: int
    new_tokens: int
    prompts: tuple[Tokens, ...] = field(default=(), repr=False)

    @property
    def tokens(self) -> int:
        """Of all prompts, padding not counted."""
        return sum(map(len, self.prompts)) if self.prompts else self.batch_size * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class MeasureReply:
    """Seconds of the pass over the prompts and of all passes after it, and the peak of memory meanwhile.

    `peak_bytes` is None where it can't be measured; see `moevolve.workers.profiling.memory`.
    """

    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int | None
