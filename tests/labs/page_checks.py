"""What every page must be, whatever is on it: well-formed and labelled; a report needs no other file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from urllib.parse import urlsplit

from starlette.testclient import TestClient

from moevolve.search.server.guard import DOCUMENT_POLICY

VOID = {"meta", "link", "br", "img", "input", "hr"}
_FETCHED = {
    "script src": "script-src",
    "link href": "style-src",
    "img src": "img-src",
    "action": "form-action",
    **dict.fromkeys(("hx-get", "hx-post", "hx-put", "hx-delete", "sse-connect", "data-course"), "connect-src"),
}
"""Directives for addresses that a browser loads by itself, by attribute, with its tag where that matters."""
_CODE = re.compile(r"(hx-)?on|[\w-]+=(javascript|js):", re.IGNORECASE)
_LOADS = {"src", "srcset", "data", "action", "formaction", "poster", "background"}


class Page(HTMLParser):
    """A page's tags and text; every tag is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._within: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        assert len(found) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self._within.append((self.open[-1] if self.open else "", data))

    @property
    def text(self) -> str:
        """What is to be read, with single spaces."""
        return " ".join(" ".join(data for within, data in self._within if within != "style").split())

    def texts_of(self, tag: str) -> list[str]:
        """What stands right in the tags of a name."""
        return [data.strip() for within, data in self._within if within == tag]

    def all(self, *names: str) -> list[dict[str, str]]:
        return [found for tag, found in self.tags if tag in names]

    @property
    def links(self) -> list[str]:
        loads = [found[name] for _, found in self.tags for name in ("href", "src", "xlink:href") if name in found]
        later = [found[name] for _, found in self.tags for name in ("hx-get", "data-course") if name in found]
        return loads + later

    @property
    def ids(self) -> list[str]:
        return [found["id"] for _, found in self.tags if "id" in found]


def _check_any(text: str, *, whole: bool) -> Page:
    """What a page of the server and a report have in common."""
    page = Page(text)
    assert not {"iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    assert all(found.get("scope") in ("row", "col") for found in page.all("th"))
    assert len(page.ids) == len(set(page.ids)), "an id is there twice"
    if whole:
        names = [tag for tag, _ in page.tags]
        assert ("html", {"lang": "en"}) in page.tags
        assert names.count("h1") == names.count("main") == names.count("title") == 1
        levels = [int(name[1]) for name in names if re.fullmatch(r"h\d", name)]
        assert all(after <= before + 1 for before, after in pairwise(levels)), "a heading is skipped"
    return page


def check(text: str, *, whole: bool = True) -> Page:
    """Fails on anything that a page of the server, or a part of one, must not be."""
    page = _check_any(text, whole=whole)
    for tag, found in page.tags:
        assert "style" not in found and tag != "style", (tag, found)
        assert tag != "script" or found.get("src", "").startswith("/static/"), found
        assert tag != "img" or found.get("alt")
        assert tag != "section" or found.get("aria-labelledby")
        assert found.get("tabindex") != "0" or found.get("aria-label") or tag == "pre", found
        assert tag != "pre" or "aria-label" not in found or "role" in found, "only what has a role has a name"
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert name not in found or found[name] in page.ids, found
    named = {found["for"] for found in page.all("label")}
    assert all(found.get("id") in named for found in page.all("select", "input") if found.get("type") != "hidden")
    if whole:
        assert text.startswith("<!DOCTYPE html>") and len(page.all("nav")) == 1
        assert page.all("a")[0] == {"class": "skip", "href": "#main"} and "main" in page.ids
    return page


def check_policy(page: Page, policy: str) -> None:
    """Fails if a page needs something that its content security policy forbids, which browsers leave out silently."""
    sources = {name: others for name, *others in map(str.split, policy.split(";"))}

    def allows(directive: str, source: str) -> bool:
        return source in sources.get(directive, sources["default-src"])

    for tag, found in page.tags:
        assert allows("style-src", "'unsafe-inline'") or (tag != "style" and "style" not in found), (tag, found)
        code = [
            name for name, value in found.items() if re.match(r"on|hx-on", name) or re.match(r"javascript:|js:", value)
        ]
        assert not code and (tag != "script" or "src" in found), (tag, found)
        assert tag not in {"base", "iframe", "object", "embed", "audio", "video", "source"}, (tag, found)
        for name, url in found.items():
            directive = _FETCHED.get(f"{tag} {name}") or _FETCHED.get(name)
            if directive is not None and (tag, found.get("rel")) != ("link", "icon"):
                where = urlsplit(url)
                source = f"{where.scheme}:" if where.scheme else "'self'"
                assert not where.netloc and allows(directive, source), (tag, found)


def page_of(client: TestClient, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, (path, answer.text[-300:])
    assert answer.headers["content-type"].startswith("text/html")
    page = check(answer.text, whole="part=1" not in path)
    check_policy(page, answer.headers["content-security-policy"])
    return page


def check_report(text: str) -> Page:
    """Fails on anything that a report, which needs no other file, must not be."""
    page = _check_any(text, whole=True)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "form"} & set(names) and not any(set(found) & _LOADS for _, found in page.tags)
    assert any(found.get("name") == "viewport" for found in page.all("meta"))
    assert all(found.get("role") != "img" or found.get("aria-label") for _, found in page.tags)
    drawings = [found for found in page.all("svg") if "aria-hidden" not in found]
    assert names.count("figure") == names.count("figcaption") == len(drawings)
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(drawing)
    for rule in ("prefers-color-scheme: dark", "@media print", "max-width"):
        assert rule in text
    # Every link leads to a place on the page, or holds what it links to.
    for link in page.links:
        assert link.startswith("data:") or (link.startswith("#") and link[1:] in page.ids), link
    for target in re.findall(r"url\(\s*['\"]?([^)'\"]*)", text):
        assert target.startswith("#") and target[1:] in page.ids, target
    check_policy(page, DOCUMENT_POLICY)
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert "@import" not in text
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, outside
    return page
