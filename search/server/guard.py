"""Who may ask for what: the outermost layer, which every request goes through and no route can leave out.

It refuses by default. What a request needs:

* a `Host` that the server goes by, so that no page elsewhere can lead a browser here under a name of its own (DNS
  rebinding), also on loopback; whether it is well it tells under any name;
* to come from no other site's page, other than as a visit of a person who follows a link;
* a token, if the server has any: `Authorization: Bearer TOKEN`, or the cookie that signing in leaves in a browser;
* if it has none, to come straight from this machine, through no proxy: others may be behind one;
* to change something: a token of scope `write`, and the header `X-Moevolve`, which a form of another site can't send;
* a body of bounded size.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moevolve.search.server.settings import Scope as TokenScope

LARGEST_BODY = 1 << 16
"""Bytes of a request's body."""
TOO_LARGE = f"a request's body may have {LARGEST_BODY:,} bytes"
HEADER = "x-moevolve"
COOKIE = "moevolve"
HEALTH = "/healthz"
"""What tells load balancers, by whatever name they ask, that the server is well."""
OPEN_PATHS = (HEALTH, "/login")
"""What needs no token, besides what is under /static/."""
DOCUMENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""Content security policy of whole documents that we make: they have styles within, no scripts, and reach nothing."""
_BY_PROXIES = ("forwarded", "via", "x-real-ip")
_LOCAL = re.compile(r"/(?![/\\]|log(in|out)\b)[!-\[\]-~]*")
"""Visible characters of ASCII but the backslash: browsers leave out others, and then see what stood apart together."""
_SAFE = ("GET", "HEAD", "OPTIONS")
_ADDED = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with less, browsers don't say of our own forms where they come from either
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded.
        hosts: names that the server goes by.
        tokens: with their scopes; without any, everybody who reaches the server may do everything.
        sign_in: the page that a browser without a token gets, by whether a token was given that isn't one, and by the
            path that it leads to.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: frozenset[str],
        tokens: Mapping[str, TokenScope],
        sign_in: Callable[[bool, str], str],
    ) -> None:
        self._app, self._hosts, self._tokens, self._sign_in = app, hosts, tokens, sign_in
        self._bounded = RequestBodyLimitMiddleware(self._let_in, LARGEST_BODY)
        # What a browser keeps tells nobody the token itself.
        self._sessions = {session_of(token): scope for token, scope in tokens.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            return
        sender = _with_headers(send, secret=not scope["path"].startswith("/static/"))
        headers = Headers(scope=scope)
        await (self._refusal(scope, headers) or self._bounded)(scope, receive, sender)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that isn't refused."""
        if scope["path"] != "/login" or scope["method"] in _SAFE:
            await self._app(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            body = await Request(scope, receive).body()
            await self._signed_in(Headers(scope=scope), body)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["path"] != HEALTH and hostname(headers.get("host", "")) not in self._hosts:
            return problem(HTTPStatus.BAD_REQUEST, "this server doesn't go by that name; see `moevolve serve --hosts`")
        if scope["path"] != HEALTH and not self._tokens and _is_passed_on(headers):
            return problem(HTTPStatus.FORBIDDEN, "this server has no tokens, which it needs behind a proxy")
        if headers.get("content-length", "0").isdigit() and int(headers.get("content-length", "0")) > LARGEST_BODY:
            return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, TOO_LARGE)
        path, writes = scope["path"], scope["method"] not in _SAFE
        if not _is_from_here(headers) and (writes or not _is_visit(headers)):
            return problem(HTTPStatus.FORBIDDEN, "the request comes from another site")
        if path in OPEN_PATHS or path.startswith("/static/"):
            return None
        has = self._scope(headers)
        if has is None:
            return self._unknown(scope, headers)
        if writes and has != "write":
            return problem(HTTPStatus.FORBIDDEN, "this token may read only")
        if writes and HEADER not in headers:
            return problem(HTTPStatus.FORBIDDEN, "requests that change something need the header X-Moevolve: 1")
        scope.setdefault("state", {})["may_write"] = has == "write"
        return None

    def _unknown(self, scope: Scope, headers: Headers) -> Response:
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        # A part of a page has no place for another one.
        whole = not path.startswith("/api") and "part" not in parse_qs(query, keep_blank_values=True)
        if whole and "text/html" in headers.get("accept", ""):
            asked = f"{quote(path)}?{query}" if query else quote(path)
            return HTMLResponse(self._sign_in(False, local_path(asked)), HTTPStatus.UNAUTHORIZED)
        refused = problem(HTTPStatus.UNAUTHORIZED, "a token is needed: Authorization: Bearer TOKEN")
        refused.headers["www-authenticate"] = "Bearer"
        return refused

    def _scope(self, headers: Headers) -> TokenScope | None:
        if not self._tokens:
            return "write"
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return _found(self._tokens, token.strip())
        return _found(self._sessions, _cookie(headers))

    def _signed_in(self, headers: Headers, body: bytes) -> Response:
        """Take the token of the form on the page for signing in."""
        form = parse_qs(body.decode("utf-8", "replace"))
        given = form.get("token", [""])[0].strip()
        asked = local_path(form.get("next", ["/"])[0])
        if _found(self._tokens, given) is None:
            return HTMLResponse(self._sign_in(True, asked), HTTPStatus.UNAUTHORIZED)
        response = RedirectResponse(asked, HTTPStatus.SEE_OTHER)
        secure = headers.get("x-forwarded-proto") == "https"
        response.set_cookie(COOKIE, session_of(given), httponly=True, samesite="strict", secure=secure)
        return response


def _is_from_here(headers: Headers) -> bool:
    """Whether a browser says that one of this server's own pages asks, or it is no browser."""
    origin = headers.get("origin")
    if origin is not None:
        return _site(origin) == headers.get("host", "")
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def _is_visit(headers: Headers) -> bool:
    """Whether a browser opens what it asks for as a page of its own, which no other page sees, or is part of."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _is_passed_on(headers: Headers) -> bool:
    """Whether a proxy says that somebody else asks."""
    return any(name in _BY_PROXIES or name.startswith("x-forwarded-") for name in headers)


def _with_headers(send: Send, *, secret: bool) -> Send:
    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _ADDED.items():
                headers.setdefault(name, value)
            if secret:
                headers.setdefault("cache-control", "no-store")
        await send(message)

    return sender


def _found(known: Mapping[str, TokenScope], given: str) -> TokenScope | None:
    """The scope of a token; how long the look-up takes tells nothing of those that there are."""
    scopes = [scope for one, scope in known.items() if hmac.compare_digest(one.encode(), given.encode())]
    return scopes[0] if scopes else None


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def session_of(token: str) -> str:
    """What a browser keeps in place of a token."""
    return hmac.new(token.encode(), b"moevolve session", hashlib.sha256).hexdigest()


def hostname(host: str) -> str:
    """The name in a `Host` header, lower case, without port and brackets; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _site(origin: str) -> str:
    """Name and port in an `Origin` header; empty if there are none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def local_path(asked: str) -> str:
    """Where to go after signing in: a path of this server with its query, or `/` for what could be something else."""
    return asked if _LOCAL.fullmatch(asked) else "/"


def problem(status: int, detail: str) -> JSONResponse:
    """What every request that fails gets."""
    return JSONResponse({"detail": detail}, status)
