"""Models that fail when they are run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def broken(model: PreTrainedModel, error: Exception) -> Iterator[None]:
    """For the length of a `with` block, the first thing that every pass does raises an error."""

    def fail(*_: Any) -> None:
        raise error

    handle = model.get_input_embeddings().register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()
