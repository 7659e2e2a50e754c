"""The service that answers requests: a store in this process, or a server (`search/server/client.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from moevolve.search.operations.opening import writable
from moevolve.search.requests.record import Request
from moevolve.search.requests.running import ResumeRequest
from moevolve.search.service.use_cases import USE_CASES
from moevolve.store.reader import StoreReader

if TYPE_CHECKING:
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.running.observer import Observer

T = TypeVar("T")


class Service(Protocol):
    """Answers requests. Use it as a context manager.

    Every error is a `StoreError` or a `UserError` of one line, the same from a store as from a server.

    Attributes:
        url: URL of the store or of the server.
    """

    @property
    def url(self) -> str: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def ask(self, request: Request[T]) -> T:
        """Answer a request; see its record for the errors."""
        ...

    def resume(self, request: ResumeRequest, observer: Observer) -> FinalTable | None:
        """Continue a search and follow it to its end; see `ResumeRequest` for the errors."""
        ...


class LocalService:
    """Answers requests from an open store, which it closes when its context is left, unless it is to keep it open."""

    def __init__(self, store: StoreReader, keep_open: bool = False) -> None:
        self.store, self.url, self._keep_open = store, store.url, keep_open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep_open:
            self.store.close()

    def ask(self, request: Request[T]) -> T:
        """See `Service`."""
        case = USE_CASES[type(request)]
        answer: T = case.function(writable(self.store) if case.writes else self.store, request)
        return answer

    def resume(self, request: ResumeRequest, observer: Observer) -> FinalTable | None:
        """See `Service`."""
        from moevolve.search.running.resume import resume

        return resume(writable(self.store), request, observer)
