"""Rotary embeddings whose frequencies depend on how long a text is: each text of a pass gets those of its own length.

`transformers` takes the longest row's for all rows of a pass, and with dynamic NTK those of the longest pass so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a model's rotary embeddings depend on, by the number of tokens of a text: texts of equal scale share frequencies.
Scale = Callable[[int], tuple[int, ...]]

_LENGTHS: ContextVar[Tensor | None] = ContextVar("lengths", default=None)


def unscaled(length: int) -> tuple[int, ...]:
    """Scale of models whose rotary embeddings are the same for texts of all lengths."""
    return ()


def separate_texts(model: PreTrainedModel) -> Scale:
    """Make every text's rotary embeddings those that the model gives it alone; returns their scale.

    The length of a text is what `texts_of` says, or else follows from its position ids, which begin at 0.
    """
    limits: set[tuple[bool, int]] = set()
    rotary: list[nn.Module] = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        kinds = kinds if isinstance(kinds, dict) else {None: kinds}
        for part, kind in kinds.items():
            if kind == "longrope":
                settings = module.config.rope_parameters
                settings = settings if part is None else settings[part]
                limits.add((False, int(settings["original_max_position_embeddings"])))
            elif isinstance(kind, str) and "dynamic" in kind:
                limits.add((True, int(module.original_max_seq_len)))
            else:
                continue
            rotary.append(module)
    if not limits:
        return unscaled
    scale = partial(_scale, sorted(limits))
    for module in rotary:
        module.forward = partial(_by_text, module, scale)
    return scale


@contextmanager
def texts_of(lengths: Tensor | None) -> Iterator[None]:
    """Context manager in which the columns of a pass belong to texts of these lengths, int64 [rows, columns].

    A text may be longer than its part in the pass, and several texts of one scale may share columns.
    """
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def _scale(limits: list[tuple[bool, int]], length: int) -> tuple[int, ...]:
    return tuple((length if grows else 1) * (length > limit) for grows, limit in limits)


def _by_text(module: nn.Module, scale: Scale, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replacement of a rotary embedding's `forward`, for positions [rows, columns], or several of these."""
    given = _LENGTHS.get()
    if given is None:
        given = _lengths(position_ids[0] if position_ids.dim() > 2 else position_ids)
    lengths = given.to(position_ids.device)
    groups: dict[tuple[int, ...], list[int]] = {}
    for length in lengths.unique().tolist():
        groups.setdefault(scale(length), []).append(length)
    made: list[Tensor] = []
    for group in groups.values():
        inside = torch.isin(lengths, torch.tensor(group, device=lengths.device))
        # One column more has the text's last position, which says its length.
        last = torch.full_like(position_ids[..., :1], max(group) - 1)
        forward = partial(type(module).forward, module, x)
        forward(torch.zeros_like(last), *args, **kwargs)  # a short text undoes what a longer one left
        found = forward(torch.cat((position_ids.where(inside, 0), last), dim=-1), *args, **kwargs)
        several = isinstance(found, tuple)
        parts = [each[..., :-1, :] for each in (found if several else (found,))]
        inside = inside.unsqueeze(-1)
        made = [each.where(inside, before) for each, before in zip(parts, made or parts, strict=True)]
    return tuple(made) if several else made[0]


def _lengths(positions: Tensor) -> Tensor:
    """Return the length of the text that each token belongs to, int64 as `positions`; one begins at every 0."""
    texts = (positions == 0).long().cumsum(dim=-1)
    longest = torch.zeros_like(torch.cat((positions, positions[..., :1]), dim=-1))
    return longest.scatter_reduce(-1, texts, positions + 1, "amax").gather(-1, texts)
