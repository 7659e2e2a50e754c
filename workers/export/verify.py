"""Comparing a checkpoint with the edited resident model, one decoder layer of it in memory at a time.

The model's class is built from the checkpoint's config on the meta device. Every part is filled from the files by the
conversion with which `transformers` loads models, runs on what the same part of the resident model was given, and goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moevolve.workers.checkpoints.loading import attention_backend, experts_arguments
from moevolve.workers.checkpoints.native import NATIVE_PREFIX, import_native
from moevolve.workers.checkpoints.shards import ShardReader, checksum
from moevolve.workers.checkpoints.state import SavedNames, empty_model, frame_state, layers_prefix
from moevolve.workers.contract.card import Agreement, CheckpointForm, Disagreement
from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.model.resident import ResidentModel

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted difference of what a part adds at a position, as a share of the largest value that it adds there."""

_AGREEING = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}
"""Share of positions that must agree: in 16 bits two experts can tie, and the order of a sum decides between them."""

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Question: which of these numbers is the largest: 17, 4 or 23?\nAnswer:",
    "In 1969, two people walked on the Moon for the first time; the third stayed in orbit.",
)


class VerificationError(RuntimeError):
    """A checkpoint that isn't what was to be written, or computes something else."""


@dataclass(frozen=True)
class Passage:
    """What went through a model for one sequence, on the host.

    Attributes:
        tokens: int64 [1, positions].
        states: what every decoder layer was given, and what the last one gave, [1, positions, hidden] each.
        normed: what the decoder gave, [1, positions, hidden].
        logits: [1, positions, vocabulary].
    """

    tokens: Tensor
    states: tuple[Tensor, ...] = field(repr=False)
    normed: Tensor = field(repr=False)
    logits: Tensor = field(repr=False)


def probe_tokens(resident: ResidentModel) -> tuple[Tensor, ...]:
    """Token sequences to compare on: a few sentences, and one that strides through the vocabulary."""
    vocabulary = int(resident.model.config.vocab_size)
    texts = [resident.tokenizer(text, return_tensors="pt")["input_ids"][:, :64] for text in PROMPTS]
    stride = (torch.arange(48) * 7919 + 13) % vocabulary
    return tuple(ids for ids in (*texts, stride[None]) if ids.numel())


@torch.inference_mode()
def passages(resident: ResidentModel) -> tuple[Passage, ...]:
    """Run the resident model, with its edit, on the sequences to compare on."""
    return tuple(_passage(resident, tokens) for tokens in probe_tokens(resident))


def _passage(resident: ResidentModel, tokens: Tensor) -> Passage:
    model: Any = resident.model
    decoder, layers = model.get_decoder(), decoder_layers(model)
    states: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: states.append(given[0].cpu())) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _, __, given: states.append(given.cpu())))
    hooks.append(decoder.register_forward_hook(lambda _, __, given: states.append(given.last_hidden_state.cpu())))
    try:
        logits = model(input_ids=tokens.to(resident.device), use_cache=False).logits.cpu()
    finally:
        for hook in hooks:
            hook.remove()
    *passed, normed = states
    return Passage(tokens, tuple(passed), normed, logits)


def verify(
    directory: Path,
    form: CheckpointForm,
    resident: ResidentModel,
    expected: Sequence[Passage],
    checksums: Mapping[str, int],
) -> Agreement:
    """Compare a checkpoint's files with an edited resident model, part by part.

    Args:
        directory: the checkpoint, with its config and modelling code.
        form: its form.
        resident: how the model is held, and where; its weights aren't looked at.
        expected: what went through it with the edit, at least one sequence.
        checksums: of all tensors that were to be written, by name.

    Raises:
        VerificationError: tensors are missing, too many, of other shapes or other than written, or a part computes
            something else than the resident model's.
    """
    exported = _FromFiles(directory, form, resident)
    exported.check_names()
    found = []
    for part, outcome in _parts(exported, expected):
        changed = [name for name in exported.last_read if exported.last_read[name] != checksums.get(name)]
        if changed or not outcome.holds:
            raise VerificationError(_told(part, outcome, changed))
        found.append((part, outcome))
    part, worst = max(found, key=lambda each: each[1].accepted)
    return Agreement(
        max_difference=max(each.largest for _, each in found),
        accepted_difference=worst.accepted,
        tolerance=worst.tolerance,
        positions=worst.positions,
        parts=len(found),
        worst_part=part,
    )


def compare(expected: Tensor, found: Tensor, dtype: torch.dtype, given: Tensor | None = None) -> Disagreement:
    """Compare what a part of a model gives, position by position.

    Differences are measured by the largest value that the part adds to what it is given at the position. One step of
    rounding is free, where that is much larger than what is added.

    Args:
        expected: the edited resident model's, [..., positions, size].
        found: the checkpoint's, same shape.
        dtype: parameter dtype of both.
        given: what the part adds to, same shape; None where it gives something new.
    """
    return _judged([_shares(expected, found, dtype, given)], dtype)


def _shares(expected: Tensor, found: Tensor, dtype: torch.dtype, given: Tensor | None) -> Tensor:
    """Differences at every position, as shares of what is added there."""
    wanted = expected.double()
    added = wanted if given is None else wanted - given.double()
    free = torch.finfo(dtype).eps * wanted.abs()
    excess = ((found.double() - wanted).abs() - free).clamp_min(0).amax(dim=-1)
    scale = added.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (excess / scale).nan_to_num(nan=float("inf")).flatten()


def _judged(shares: Sequence[Tensor], dtype: torch.dtype) -> Disagreement:
    ranked = torch.cat(list(shares)).sort().values
    must_agree = max(1, round(_AGREEING[dtype] * len(ranked)))
    return Disagreement(float(ranked[-1]), float(ranked[must_agree - 1]), TOLERANCE[dtype], len(ranked))


@torch.inference_mode()
def _parts(exported: _FromFiles, expected: Sequence[Passage]) -> Iterator[tuple[str, Disagreement]]:
    """Every part of the model with how far it is from the resident one."""
    frame, head = exported.frame_names()
    with exported.holding(frame):
        entered, arguments, normed = exported.run_frame(expected)
        yield "embeddings", exported.compared([each.states[0] for each in expected], entered)
        yield "final norm", exported.compared([each.normed for each in expected], normed)
        if not head:
            yield "output head", exported.compared([each.logits for each in expected], exported.run_head(expected))
    for index in range(len(exported.layers)):
        with exported.holding(exported.layer_names(index)):
            given = [each.states[index] for each in expected]
            left = exported.run_layer(index, given, [each[index] for each in arguments])
            wanted = [each.states[index + 1] for each in expected]
            yield f"decoder layer {index}", exported.compared(wanted, left, given)
    if head:
        with exported.holding(head):
            yield "output head", exported.compared([each.logits for each in expected], exported.run_head(expected))


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a decoder layer is given besides hidden states: masks, positions."""


class _FromFiles:
    """A checkpoint as a model on the meta device, of which parts are filled from its files.

    Attributes:
        layers: its decoder layers.
        last_read: checksums of the files' tensors that were last read, by name.
    """

    def __init__(self, directory: Path, form: CheckpointForm, resident: ResidentModel) -> None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._reader = ShardReader(directory)
        self._device = resident.device
        self._dtype: torch.dtype = resident.model.dtype
        kind: Any
        if form == "stock":
            config = AutoConfig.from_pretrained(str(directory))
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        else:
            kind = import_native(directory)
            config = kind.config_class.from_pretrained(str(directory))
        family = str(config.model_type).removeprefix(NATIVE_PREFIX)
        self._model: Any = empty_model(
            kind,
            config,
            self._dtype,
            attn_implementation=attention_backend(resident.config.attn_implementation, family),
            **experts_arguments(resident.config.experts_implementation, family),
        )
        self._names = SavedNames(self._model)
        self._conversions: Any = get_model_conversion_mapping(self._model)
        self._prefix = layers_prefix(self._model)
        self.layers = decoder_layers(self._model)
        self.last_read: dict[str, int] = {}

    def check_names(self) -> None:
        """Check that the files have the tensors that the model's class expects, and no others.

        Raises:
            VerificationError: they don't.
        """
        expected = {name for saved in self._names.tensors.values() for name in saved}
        missing, unexpected = expected - self._reader.names, self._reader.names - expected
        for what, names in (("lack", missing), ("have unexpected", unexpected)):
            if names:
                raise VerificationError(f"the files {what} {len(names)} tensors, such as {min(names)}")

    def layer_names(self, index: int) -> list[str]:
        """Tensors of a decoder layer, by name in the model."""
        return [name for name in self._names.tensors if name.startswith(f"{self._prefix}{index}.")]

    def frame_names(self) -> tuple[list[str], list[str]]:
        """Tensors outside the decoder layers by name in the model, and those of an output head of its own."""
        frame = list(frame_state(self._model))
        head = [name for name in frame if self._model.get_submodule(name.rpartition(".")[0]) is self._head]
        tied = any(self._model.get_submodule(name.rpartition(".")[0]) is self._head for name in self._tied)
        return [name for name in frame if tied or name not in head], [] if tied else head

    @property
    def _head(self) -> nn.Module:
        head: nn.Module = self._model.get_output_embeddings()
        return head

    @property
    def _tied(self) -> Iterable[str]:
        return tuple(self._model.all_tied_weights_keys)

    @contextmanager
    def holding(self, names: Sequence[str]) -> Iterator[None]:
        """Have some of the model's tensors on the device for the length of a `with` block."""
        self.last_read = {}
        # What is put together of several tensors first, the largest first: that takes twice the room for a moment.
        saved = self._names.tensors
        merged = sorted((name for name in names if len(saved[name]) > 1), key=lambda name: -_size(saved[name]))
        for each in [[name] for name in merged] + [[name for name in names if len(saved[name]) == 1]]:
            self._fill(each)
        self._model.tie_weights()
        try:
            yield
        finally:
            for name in names:
                self._model.get_submodule(name.rpartition(".")[0]).to("meta")

    def _fill(self, names: Sequence[str]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        wanted = [each for name in names for each in self._names.tensors[name]]
        tensors = self._reader.read(wanted)
        self.last_read |= {name: checksum(tensor) for name, tensor in tensors.items()}
        how = LoadStateDictConfig(
            device_map={"": self._device},
            dtype=self._dtype,
            dtype_plan=self._model._get_dtype_plan(self._dtype),  # noqa: SLF001 - as `from_pretrained` makes it
            weight_mapping=self._conversions,
        )
        info, _ = convert_and_load_state_dict_in_model(self._model, tensors, how)
        trouble = [*info.mismatched_keys, *info.unexpected_keys, *info.conversion_errors, *info.error_msgs]
        if trouble:
            raise VerificationError(f"transformers can't load tensor {trouble[0]}")
        left = [name for name in names if self._model.get_parameter_or_buffer(name).is_meta]
        if left:
            raise VerificationError(f"transformers finds nothing for tensor {left[0]}")

    def run_frame(self, expected: Sequence[Passage]) -> tuple[list[Tensor], list[list[_Arguments]], list[Tensor]]:
        """Run what is outside the decoder layers, which hand on what the resident model's last one gave.

        Returns:
            For every sequence what the first layer is given, what every layer is given besides, and what the decoder
            gives.
        """
        for place in {name.rpartition(".")[0] for name, _ in self._model.named_non_persistent_buffers()}:
            # They come of the config alone: position embeddings.
            module = type(self._model.get_submodule(place))
            self._model.set_submodule(place, module(config=self._model.config).to(self._device))
        entered, arguments, normed = [], [], []
        for each in expected:
            seen: list[tuple[Tensor, _Arguments]] = []
            with _standing_in(self.layers, seen, each.states[-1].to(self._device)):
                decoded = self._model.get_decoder()(input_ids=each.tokens.to(self._device), use_cache=False)
            entered.append(seen[0][0])
            arguments.append([given for _, given in seen])
            normed.append(decoded.last_hidden_state)
        return entered, arguments, normed

    def run_layer(self, index: int, given: Sequence[Tensor], arguments: Sequence[_Arguments]) -> list[Tensor]:
        """Run a decoder layer on hidden states."""
        pairs = zip(given, arguments, strict=True)
        return [self.layers[index](state.to(self._device), *args, **kwargs) for state, (args, kwargs) in pairs]

    def run_head(self, expected: Sequence[Passage]) -> list[Tensor]:
        """Logits of what the resident model's decoder gave."""
        return [self._head(each.normed.to(self._device)) for each in expected]

    def compared(
        self, expected: Sequence[Tensor], found: Sequence[Tensor], given: Sequence[Tensor] | None = None
    ) -> Disagreement:
        """`compare`, of all sequences, one after the other: logits of all would be large."""
        bases = [None] * len(expected) if given is None else given
        triples = zip(expected, found, bases, strict=True)
        return _judged([_shares(wanted, got.cpu(), self._dtype, base) for wanted, got, base in triples], self._dtype)


@contextmanager
def _standing_in(layers: Sequence[nn.Module], seen: list[tuple[Tensor, _Arguments]], last: Tensor) -> Iterator[None]:
    """For the length of a `with` block let layers note what they are given, and hand it on; the last gives `last`."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((hidden_states, (args, kwargs)))
        return last if len(seen) == len(layers) else hidden_states

    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _told(part: str, outcome: Disagreement, changed: Sequence[str]) -> str:
    differs = (
        f"{part} differs from the edited model's by {outcome.accepted:.3g} of what it adds, allowed "
        f"{outcome.tolerance:.3g}"
    )
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"tensor {changed[0]}{others} in the files isn't what was written; {differs}"
    return f"{differs}; its tensors are what was written, so the checkpoint's class makes something else of them"
