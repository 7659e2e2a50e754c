"""How long commands end early: by a signal, or for want of something to run on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from moevolve.search.cli.console import errors

_INTERRUPTED = 130


@contextmanager
def told_in_a_line(
    interrupted: str,
    failure: type[Exception],
    hint: str = "",
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
) -> Iterator[None]:
    """Exit with one line on stderr and a code where the work within is interrupted or fails.

    Args:
        interrupted: what to say after Ctrl-C; the code is 130.
        failure: the error that the user can do something about; the code is 1.
        hint: what, if the error doesn't say so itself.
        signals: taken for Ctrl-C from now on: a cluster manager stops a driver with SIGTERM.
    """
    for each in signals:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        errors.print(interrupted, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    except failure as error:
        errors.print(f"error: {error}{hint and f'; {hint}'}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
