"""Compares a checkpoint with the edited resident model, with one decoder layer of the checkpoint in memory at a time.

The checkpoint's model is built on the meta device. Part by part, its tensors are loaded from the files with the
conversion of `transformers`, it is run on the inputs that the same part of the resident model got, and it is unloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from moevolve.workers.checkpoints.headers import stored_tensors
from moevolve.workers.checkpoints.loading import backends, model_class
from moevolve.workers.checkpoints.native import NATIVE_PREFIX, import_native
from moevolve.workers.checkpoints.shards import checksum, read_tensor
from moevolve.workers.checkpoints.state import (
    SavedNames,
    empty_model,
    frame_state,
    layers_prefix,
    load_part,
    restore_buffers,
)
from moevolve.workers.contract.card import Agreement, CheckpointForm
from moevolve.workers.export.folder import VerificationError
from moevolve.workers.families.decoder import (
    CARRIED,
    carries,
    decoder_layers,
    decoder_of,
    only_layer,
    skipped,
    state_of,
)
from moevolve.workers.model.resident import ResidentModel

# Largest accepted difference at a position, relative to the largest value that the part adds to its input there.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}

# Share of positions that must agree: in 16 bits two experts can tie, and the order of a sum decides between them.
_AGREEING = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}

# Different kinds of text, so that routers choose many experts.
PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Question: which of these numbers is the largest: 17, 4 or 23?\nAnswer:",
    "In 1969, two people walked on the Moon for the first time; the third stayed in orbit.",
)


@dataclass(frozen=True)
class Activations:
    """The activations of a model for one sequence, on the host.

    Attributes:
        tokens: Token ids, int64 [1, positions].
        states: Input of every decoder layer and output of the last one, [1, positions, hidden] each.
        normed: Output of the decoder after the final norm, [1, positions, hidden].
        logits: Output of the head, [1, positions, vocabulary].
    """

    tokens: Tensor
    states: tuple[Tensor, ...] = field(repr=False)
    normed: Tensor = field(repr=False)
    logits: Tensor = field(repr=False)


class Recorder:
    """Records the edited resident model's activations on `PROMPTS` and on a sequence of arbitrary tokens.

    Where layers are edited one at a time, `layer` is called with each of them.
    """

    def __init__(self, resident: ResidentModel) -> None:
        self._resident = resident
        texts = [resident.tokenizer(text, return_tensors="pt")["input_ids"][:, :64] for text in PROMPTS]
        # Large steps cover the vocabulary; sentences have little of it.
        stride = (torch.arange(48) * 7919 + 13) % int(resident.model.config.vocab_size)
        self._tokens = [tokens for tokens in (*texts, stride[None]) if tokens.numel()]
        self._by_layer = resident.one_layer_at_a_time
        self._states: list[list[Tensor]] = [[] for _ in self._tokens]

    @torch.inference_mode()
    def layer(self, index: int) -> None:
        """Run a decoder layer, which has the edit now."""
        if self._by_layer:
            layers = decoder_layers(self._resident.model)
            for tokens, states in zip(self._tokens, self._states, strict=True):
                if not states:
                    states.append(self._only(tokens, len(layers), None))
                states.append(self._only(tokens, index, states[-1]))

    @torch.inference_mode()
    def recorded(self) -> tuple[Activations, ...]:
        """Return the activations, after the last layer."""
        layers = decoder_layers(self._resident.model)
        found = []
        for tokens, states in zip(self._tokens, self._states, strict=True):
            with skipped(layers, states[-1].to(self._resident.device)) if self._by_layer else nullcontext():
                whole = _record(self._resident, tokens)
            found.append(replace(whole, states=tuple(states)) if self._by_layer else whole)
        return tuple(found)

    def _only(self, tokens: Tensor, index: int, state: Tensor | None) -> Tensor:
        device, model = self._resident.device, self._resident.model
        with only_layer(decoder_layers(model), index, None if state is None else state.to(device)) as found:
            decoder_of(model)(input_ids=tokens.to(device), use_cache=False)
        return found[0].cpu()


def _record(resident: ResidentModel, tokens: Tensor) -> Activations:
    model = resident.model
    decoder, layers = decoder_of(model), decoder_layers(model)
    states: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0].cpu())) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _, __, output: states.append(state_of(output).cpu())))
    hooks.append(decoder.register_forward_hook(lambda _, __, output: states.append(output.last_hidden_state.cpu())))
    # Some families scale or cap what the head gives, by settings that an export copies.
    head = model.get_output_embeddings()
    hooks.append(head.register_forward_hook(lambda _, __, output: states.append(output.cpu())))
    try:
        model(input_ids=tokens.to(resident.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    *layer_states, normed, logits = states
    return Activations(tokens, tuple(layer_states), normed, logits)


def verify(
    directory: Path,
    form: CheckpointForm,
    resident: ResidentModel,
    expected: Sequence[Activations],
    checksums: Mapping[str, int],
) -> Agreement:
    """Compare a checkpoint's files with an edited resident model, part by part.

    The resident model's settings and device are used, and instead of its weights the activations `expected`, on at
    least one sequence. Checksums are those of the tensors that were written, by name.

    Raises:
        VerificationError: Tensors are missing, unexpected, of the wrong shape or not as written, or a part computes
            something else than the resident model's.
    """
    exported = _ExportedModel(directory, form, resident)
    exported.check_names()
    compared = []
    for each in _compare_parts(exported, expected):
        changed = [name for name in exported.last_read if exported.last_read[name] != checksums.get(name)]
        if changed or not each.holds:
            raise VerificationError(_failure(each, changed))
        compared.append(each)
    worst = max(compared, key=lambda each: each.accepted_difference)
    return replace(worst, max_difference=max(each.max_difference for each in compared), parts=len(compared))


def compare(
    part: str,
    expected: Sequence[Tensor],
    outputs: Iterable[Tensor],
    dtype: torch.dtype,
    inputs: Sequence[Tensor] | None = None,
) -> Agreement:
    """Compare the outputs of a part of a model for several sequences, position by position.

    Differences are relative to the largest value that the part adds to its input at the position. One rounding step of
    the output is ignored, because it can be much larger than the addition.

    Args:
        part: Name of the part.
        expected: Outputs of the edited resident model, [..., positions, size] each.
        outputs: Outputs of the checkpoint, in the same shapes.
        dtype: Parameter dtype of both.
        inputs: Hidden states that the part adds to, in the same shapes; None if the part doesn't add to its input.
    """
    differences = []
    for place, (wanted, output) in enumerate(zip(expected, outputs, strict=True)):
        exact = wanted.double()
        added = exact if inputs is None else exact - inputs[place].double()
        rounding = torch.finfo(dtype).eps * exact.abs()
        excess = ((output.cpu().double() - exact).abs() - rounding).clamp_min(0).amax(dim=-1)
        scale = added.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        differences.append((excess / scale).nan_to_num(nan=float("inf")).flatten())
    ranked = torch.cat(differences).sort().values
    must_agree = max(1, round(_AGREEING[dtype] * len(ranked)))
    return Agreement(float(ranked[-1]), float(ranked[must_agree - 1]), TOLERANCE[dtype], len(ranked), part)


@torch.inference_mode()
def _compare_parts(exported: _ExportedModel, expected: Sequence[Activations]) -> Iterator[Agreement]:
    """Compare every part with the resident model's."""
    device, dtype = exported.device, exported.dtype
    decoder, head = decoder_of(exported.model), exported.model.get_output_embeddings()
    layers = decoder_layers(exported.model)
    frame, of_head = exported.frame_names()
    with exported.loaded(frame):
        restore_buffers(exported.model, device)
        arguments, normed = [], []
        for each in expected:
            calls: list[_Arguments] = []
            # The last layer returns the resident model's output.
            with skipped(layers, each.states[-1].to(device)), _recording(layers, calls):
                normed.append(decoder(input_ids=each.tokens.to(device), use_cache=False).last_hidden_state)
            arguments.append(calls)
        embedded = [calls[0][0][0] for calls in arguments]
        yield compare("embeddings", [each.states[0] for each in expected], embedded, dtype)
        yield compare("final norm", [each.normed for each in expected], normed, dtype)
    with exported.loaded(of_head):
        # Hunyuan 4 keeps its head in float32.
        logits = (head(each.normed.to(device, head.weight.dtype)) for each in expected)
        yield compare("output head", [each.logits for each in expected], logits, dtype)
    carried: list[Tensor | None] = [None] * len(expected)
    for index, layer in enumerate(layers):
        carrying, outputs = carries(layer), []
        prefix = f"{layers_prefix(exported.model)}{index}."
        with exported.loaded([name for name in exported.names.tensors if name.startswith(prefix)]):
            for sequence, each in enumerate(expected):
                args, kwargs = arguments[sequence][index]
                handed = {CARRIED: carried[sequence]} if carrying else {}
                output = layer(each.states[index].to(device), *args[1:], **kwargs | handed)
                carried[sequence] = output[1] if carrying else None
                outputs.append(state_of(output))
            wanted, inputs = [each.states[index + 1] for each in expected], [each.states[index] for each in expected]
            yield compare(f"decoder layer {index}", wanted, outputs, dtype, inputs)


# Positional and keyword arguments of a decoder layer: hidden states, masks, positions and others.
_Arguments = tuple[tuple[Tensor, *tuple[object, ...]], dict[str, object]]


class _ExportedModel:
    """The model of a checkpoint on the meta device; parts are loaded from the files."""

    def __init__(self, directory: Path, form: CheckpointForm, resident: ResidentModel) -> None:
        from transformers import AutoConfig
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._stored = stored_tensors(directory)
        self.device = resident.device
        self.dtype: torch.dtype = resident.model.dtype
        if form == "stock":
            config = AutoConfig.from_pretrained(str(directory))
            kind = model_class(config)
        else:
            kind = import_native(directory)
            config = kind.config_class.from_pretrained(str(directory))
        family = str(config.model_type).removeprefix(NATIVE_PREFIX)
        self.model = empty_model(kind, config, self.dtype, **backends(family))
        self.names = SavedNames(self.model)
        self._conversions = get_model_conversion_mapping(self.model)
        self.last_read: dict[str, int] = {}

    def check_names(self) -> None:
        """Raise a `VerificationError` unless the files contain exactly the tensors that the model's class expects."""
        expected = {name for saved in self.names.tensors.values() for name in saved}
        missing, unexpected = expected - self._stored.keys(), self._stored.keys() - expected
        for what, names in (("lack", missing), ("have unexpected", unexpected)):
            if names:
                raise VerificationError(f"the files {what} {len(names)} tensors, such as {min(names)}")

    def frame_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the tensors outside the decoder layers, and of those that the output head needs.

        A head of its own isn't among the former, so that it isn't in memory beside the embeddings.
        """
        frame = list(frame_state(self.model))
        head = self.model.get_output_embeddings()
        of_head = [name for name in frame if self.model.get_submodule(name.rpartition(".")[0]) is head]
        tied = {self.model.get_submodule(name.rpartition(".")[0]) for name in self.model.all_tied_weights_keys}
        if not of_head or head in tied:
            return frame, frame
        return [name for name in frame if name not in of_head], of_head

    @contextmanager
    def loaded(self, names: Sequence[str]) -> Iterator[None]:
        """Context manager that loads some of the model's tensors to the device and unloads them at the end."""
        self.last_read = {}
        # Fusing several tensors into one temporarily takes twice their memory, so these come first, the largest first.
        saved = self.names.tensors
        sizes = {name: sum(tensor.nbytes for tensor in saved[name].values()) for name in names}
        fused = sorted((name for name in names if len(saved[name]) > 1), key=lambda name: -sizes[name])
        for each in [[name] for name in fused] + [[name for name in names if len(saved[name]) == 1]]:
            self._load(each)
        self.model.tie_weights()
        try:
            yield
        finally:
            for name in names:
                self.model.get_submodule(name.rpartition(".")[0]).to("meta")

    def _load(self, names: Sequence[str]) -> None:
        tensors = {each: read_tensor(self._stored[each]) for name in names for each in self.names.tensors[name]}
        self.last_read |= {name: checksum(tensor) for name, tensor in tensors.items()}
        info = load_part(self.model, self._conversions, tensors, self.device, self.dtype)
        trouble = [*info.mismatched_keys, *info.unexpected_keys, *info.conversion_errors, *info.error_msgs]
        if trouble:
            raise VerificationError(f"transformers can't load tensor {trouble[0]}")
        left = [name for name in names if self.model.get_parameter_or_buffer(name).is_meta]
        if left:
            raise VerificationError(f"transformers finds nothing for tensor {left[0]}")


@contextmanager
def _recording(layers: Sequence[nn.Module], calls: list[_Arguments]) -> Iterator[None]:
    """Context manager in which layers append their arguments to `calls`."""

    def record(_: nn.Module, args: tuple[Tensor, *tuple[object, ...]], kwargs: dict[str, object]) -> None:
        calls.append((args, kwargs))

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _failure(part: Agreement, changed: Sequence[str]) -> str:
    """Message that says how a part differs, and which of its tensors aren't as written."""
    differs = (
        f"{part.worst_part} differs from the edited model's by {part.accepted_difference:.3g} of its output, allowed "
        f"{part.tolerance:.3g}"
    )
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"tensor {changed[0]}{others} in the files isn't what was written; {differs}"
    return f"{differs}; its tensors are what was written, so the checkpoint's class makes something else of them"
