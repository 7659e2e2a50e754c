"""Idle and slow clients of a real server with short time limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from waiting import PATIENT_S

from moevolve.search.server.connections import BoundedProtocol

LONG_S = PATIENT_S
HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class ImpatientProtocol(BoundedProtocol):
    request_timeout_s = 1.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Responds with the length of the body, at `/slow` after a delay."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    if scope["path"] == "/slow":
        await asyncio.sleep(1.5 * ImpatientProtocol.request_timeout_s)
    await send({"type": "http.response.body", "body": b"%4d" % length})


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The port of a server with short time limits."""
    config = uvicorn.Config(
        app, http=ImpatientProtocol, ws="none", lifespan="off", log_level="error", timeout_keep_alive=LONG_S
    )
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    running = asyncio.ensure_future(server.serve([listening]))
    yield listening.getsockname()[1]
    server.should_exit = True
    await running


async def answer_to(port: int, pieces: list[bytes]) -> bytes:
    """All that a server sends to a client, which takes its time, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        if not reader.at_eof():
            writer.write(piece)
            await asyncio.sleep(0.1)
    try:
        return await asyncio.wait_for(reader.read(), LONG_S / 3)
    except ConnectionError:
        return b""
    finally:
        writer.close()


ASKED: list[tuple[list[bytes], int]] = [
    ([], 0),
    ([HEAD[:20]], 0),
    ([HEAD[place : place + 1] for place in range(len(HEAD))], 0),
    ([HEAD.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\nhalf")], 0),
    ([HEAD], 1),
    ([HEAD, HEAD[:20]], 1),
    ([HEAD + HEAD[:20]], 1),
    ([HEAD, HEAD], 2),
    ([HEAD.replace(b"/ ", b"/slow ")], 1),
    ([HEAD.replace(b"/ ", b"/slow ") + HEAD], 2),
]
"""What clients send, and how many whole requests that is."""


def test_a_connection_without_a_complete_request_times_out() -> None:
    async def ask() -> None:
        async with served() as port:
            found = await asyncio.gather(*(answer_to(port, pieces) for pieces, _ in ASKED))
        for answer, (pieces, count) in zip(found, ASKED, strict=True):
            assert answer.count(b"HTTP/1.1 200") == answer.count(b"\r\n\r\n   0") == count, pieces

    asyncio.run(ask())
