"""Idle and slow clients: with a real server and short time limits, and with one that has few files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from killing import MOEVOLVE
from waiting import PATIENT_S

from moevolve.search.server.connections import BACKLOG, BoundedProtocol

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


def test_idle_connections_keep_no_client_out(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    few = ["bash", "-c", 'ulimit -n 256 && exec "$0" "$@"', MOEVOLVE]
    command = [*few, "serve", "--port", "0", "--store", f"sqlite:///{tmp_path / 'few.db'}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOEVOLVE_")}
    with said.open("wb") as errors, ExitStack() as silent:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split()[2].rstrip(b";").rpartition(b":")[2])
            # The last thing is an answer: uvicorn waits in vain for connections that it accepts while it shuts down.
            for place in range(5 * BACKLOG):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), LONG_S))
                if place % BACKLOG == BACKLOG - 1:  # more at once would be asked to come again in a second
                    assert httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=LONG_S).text == "ok\n"
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(LONG_S)
    assert said.read_text() == f"made a new store at {tmp_path / 'few.db'}: there was none\n"
