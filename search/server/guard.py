"""Access control: the outermost ASGI middleware, which every request passes and no route can bypass.

Requests are refused unless they meet all of these conditions:

* The `Host` is one of the server's names, also on loopback, so that no other site can reach the server from a browser
  under a name of its own (DNS rebinding). Only the health check answers under any name.
* The request doesn't come from another site's page, unless a person followed a link there.
* If the server has tokens, the request has one, as `Authorization: Bearer TOKEN`, or the cookie of a session that was
  begun with one and is still open.
* If the server has no tokens, the request comes from this machine and through no proxy, behind which there may be
  others.
* If it changes something, its token has scope `write`, and it has the header `X-Moevolve`, which a form of another site
  can't send.
* Its body is no larger than `MAX_BODY_BYTES`, or than an uploaded file may be.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote

from cachetools import TTLCache
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moevolve.search.server.settings import Token
from moevolve.store.events import ASKER

# Far more than the largest request, a launch with all of its settings, and little enough for many at once.
MAX_BODY_BYTES = 1 << 16
# Start of the paths that files are uploaded to.
_UPLOADS = "/api/data/"
HEADER = "x-moevolve"
COOKIE = "moevolve"
# Path of the health check for load balancers, which is answered under any host name.
HEALTH = "/healthz"
# Path of the form that ends a session. It can't be opened, so that no link signs anybody out.
LOGOUT = "/logout"
# Paths that need no token, besides those under /static/.
OPEN_PATHS = (HEALTH, "/login")
# Content security policy of reports and figures: inline styles are allowed, scripts and requests aren't.
DOCUMENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
# Seconds after which a session ends, however much it is used.
SESSION_S = 12 * 3600
# Number of sessions that are kept; one that hasn't been used for long ends when another one begins.
MAX_SESSIONS = 10_000
# Token of everybody who can connect to a server without tokens.
_NO_TOKEN = Token("write", "a user of the server's machine")
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
# Visible ASCII without the backslash. Browsers drop some other characters, which could leave two slashes in a row.
_LOCAL = re.compile(r"/(?![/\\]|log(in|out)\b)[!-\[\]-~]*")
# A `Host` header: a name, or an address of IPv6 in brackets, and a port.
_HOST = re.compile(r"([^\[\]:/?#@\s]+|\[[^\[\]/?#@\s]+\])(:\d*)?")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_RESPONSE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with `no-referrer`, forms of our own pages would have no origin either
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware that answers refused requests itself.

    Args:
        app: The guarded application.
        hosts: Host names of the server, lower case and without ports.
        tokens: Tokens by their text. If there are none, everyone who can connect may read and write.
        sign_in: Makes the sign-in page from two values: whether a wrong token was entered, and the path to open next.
        upload_bytes: Largest size of an uploaded file.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: frozenset[str],
        tokens: Mapping[str, Token],
        sign_in: Callable[[bool, str], str],
        upload_bytes: int = 0,
    ) -> None:
        self._app, self._hosts, self._tokens, self._sign_in = app, hosts, tokens, sign_in
        self._upload_bytes = max(upload_bytes, MAX_BODY_BYTES)
        self._sessions = Sessions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            return
        sender = _with_headers(send, secret=not scope["path"].startswith("/static/"))
        headers = Headers(scope=scope)
        answer: ASGIApp | None = self._refusal(scope, headers)
        if answer is None:
            answer = RequestBodyLimitMiddleware(self._answer, self._most_bytes(scope))
        if scope["method"] == "HEAD":
            # Routes only know GET. The server cuts the body of a response according to the scope it made itself.
            scope, sender = {**scope, "method": "GET"}, _head_of(sender)
        await answer(scope, receive, sender)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in _SAFE_METHODS or scope["path"] not in ("/login", LOGOUT):
            await self._app(scope, receive, send)
            return
        if scope["path"] == LOGOUT:
            await self._sign_out_response(Headers(scope=scope))(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            body = await Request(scope, receive).body()
            await self._sign_in_response(scope, Headers(scope=scope), body)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["path"] != HEALTH and hostname(headers.get("host", "")) not in self._hosts:
            return problem(HTTPStatus.BAD_REQUEST, "this server doesn't go by that name; see `moevolve serve --hosts`")
        proxied = any(name in _PROXY_HEADERS or name.startswith("x-forwarded-") for name in headers)
        if scope["path"] != HEALTH and not self._tokens and proxied:
            return problem(HTTPStatus.FORBIDDEN, "this server has no tokens, which it needs behind a proxy")
        if (malformed := _malformed(scope, headers, self._most_bytes(scope))) is not None:
            return malformed
        path, writes = scope["path"], scope["method"] not in _SAFE_METHODS
        # No other page can read or embed a response that a browser opens as a top-level page.
        opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if not _is_same_origin(scope, headers) and (writes or not opened):
            return problem(HTTPStatus.FORBIDDEN, "the request comes from another site")
        if path in OPEN_PATHS or path.startswith("/static/") or (path == LOGOUT and writes):
            return None
        token = self._token(headers)
        if token is None:
            return self._unauthorized(scope, headers)
        if writes and token.scope != "write":
            return problem(HTTPStatus.FORBIDDEN, "this token may read only")
        if writes and HEADER not in headers:
            return problem(HTTPStatus.FORBIDDEN, "requests that change something need the header X-Moevolve: 1")
        scope.setdefault("state", {})["may_write"] = token.scope == "write"
        ASKER.set(token.name)
        return None

    def _most_bytes(self, scope: Scope) -> int:
        return self._upload_bytes if is_upload(scope) else MAX_BODY_BYTES

    def _unauthorized(self, scope: Scope, headers: Headers) -> Response:
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        # A sign-in page can't stand inside a part of a page.
        whole = not path.startswith("/api") and "part" not in parse_qs(query, keep_blank_values=True)
        if whole and "text/html" in headers.get("accept", ""):
            asked = f"{quote(path)}?{query}" if query else quote(path)
            return HTMLResponse(self._sign_in(False, local_path(asked)), HTTPStatus.UNAUTHORIZED)
        refused = problem(HTTPStatus.UNAUTHORIZED, "a token is needed: Authorization: Bearer TOKEN")
        refused.headers["www-authenticate"] = "Bearer"
        return refused

    def _token(self, headers: Headers) -> Token | None:
        if not self._tokens:
            return _NO_TOKEN
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return _known(self._tokens, token.strip())
        return self._sessions.token(_cookie(headers))

    def _sign_in_response(self, scope: Scope, headers: Headers, body: bytes) -> Response:
        form = parse_qs(body.decode("utf-8", "replace"))
        given = form.get("token", [""])[0].strip()
        asked = local_path(form.get("next", ["/"])[0])
        token = _known(self._tokens, given)
        if token is None:
            return HTMLResponse(self._sign_in(True, asked), HTTPStatus.UNAUTHORIZED)
        response = RedirectResponse(asked, HTTPStatus.SEE_OTHER)
        secure = browser_scheme(scope, headers) == "https"
        session = self._sessions.begin(token)
        response.set_cookie(COOKIE, session, max_age=SESSION_S, httponly=True, samesite="strict", secure=secure)
        return response

    def _sign_out_response(self, headers: Headers) -> Response:
        self._sessions.end(_cookie(headers))
        response = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response


def is_upload(scope: Mapping[str, object]) -> bool:
    """Return whether a request uploads a file."""
    return scope["method"] == "PUT" and str(scope["path"]).startswith(_UPLOADS)


def too_large(most: int) -> str:
    """Return what is wrong with a body of more bytes than `most`."""
    return f"a request's body may have {most:,} bytes here"


def _malformed(scope: Scope, headers: Headers, most: int) -> Response | None:
    """Return the answer to a request that is ambiguous, too large or has an address that can't be one."""
    if "content-length" in headers and "transfer-encoding" in headers:
        # The two say different things about where the next request begins; a proxy may believe the other one.
        refused = problem(HTTPStatus.BAD_REQUEST, "a request has Content-Length or Transfer-Encoding, not both")
        refused.headers["connection"] = "close"
        return refused
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        # Refused before the application, which would log the error: strangers could fill the disk with it.
        return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large(most))
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        return problem(HTTPStatus.NOT_FOUND, "the address has a NUL in it, which no name has")
    return None


def _is_same_origin(scope: Scope, headers: Headers) -> bool:
    """Return whether the request comes from one of this server's pages, or from no browser."""
    origin = headers.get("origin")
    if origin is not None:
        return origin == f"{browser_scheme(scope, headers)}://{headers.get('host', '')}"
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def browser_scheme(scope: Scope, headers: Headers) -> str:
    """Return the scheme that the browser used: the connection's own, unless a TLS proxy says that it was https."""
    return "https" if headers.get("x-forwarded-proto") == "https" else str(scope["scheme"])


def _with_headers(send: Send, *, secret: bool) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _RESPONSE_HEADERS.items():
                headers.setdefault(name, value)
            if secret:
                headers.setdefault("cache-control", "no-store")
        await send(message)

    return sender


def _head_of(send: Send) -> Send:
    """Send the head of a response only, so that also the endless stream of news ends after it."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    return sender


def _known(tokens: Mapping[str, Token], given: str) -> Token | None:
    """Return the token with this text; the time it takes doesn't depend on how much of the text is right."""
    found = [token for text, token in tokens.items() if hmac.compare_digest(text.encode(), given.encode())]
    return found[0] if found else None


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def hostname(host: str) -> str:
    """Return the name in a `Host` header, lower case, without port and brackets; empty if it is malformed."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].strip("[]").lower()


def local_path(asked: str) -> str:
    """`asked` if it is certainly a path of this server, with an optional query; else `/`."""
    return asked if _LOCAL.fullmatch(asked) else "/"


def problem(status: int, detail: str) -> JSONResponse:
    """Return a JSON response with the one line `detail`, which every failed request gets."""
    return JSONResponse({"detail": detail}, status)


class Sessions:
    """The open sessions of browsers that have signed in: random ids that expire and can be revoked.

    They are in this process's memory, so everyone signs in again after a restart of the server.

    Args:
        clock: Seconds since some fixed moment. The default can't be set, so no session outlives a change of the date.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: TTLCache[bytes, Token] = TTLCache(MAX_SESSIONS, SESSION_S, clock)

    def begin(self, token: Token) -> str:
        """Begin a session with a token; returns its id, which the browser keeps as a cookie."""
        given = secrets.token_urlsafe(32)
        self._open[_hashed(given)] = token
        return given

    def token(self, given: str) -> Token | None:
        """Return the token of the session with an id; None if the session has ended."""
        return self._open.get(_hashed(given))

    def end(self, given: str) -> None:
        """End a session, if there is one with this id."""
        self._open.pop(_hashed(given), None)


def _hashed(given: str) -> bytes:
    # The time to look up a hash says nothing about how much of an id is right.
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
