"""Pages of a server as they are without JavaScript, and what each of them must be, whatever is on it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

from starlette.testclient import TestClient

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page's tags and text; every tag is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
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

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        self._within.append((self.open[-1] if self.open else "", data))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def texts_of(self, tag: str) -> list[str]:
        """What stands right in the tags of a name."""
        return [data.strip() for within, data in self._within if within == tag]

    def all(self, *names: str) -> list[dict[str, str]]:
        return [found for tag, found in self.tags if tag in names]

    @property
    def links(self) -> list[str]:
        loads = [found[name] for _, found in self.tags for name in ("href", "src") if name in found]
        later = [found[name] for _, found in self.tags for name in ("hx-get", "data-course") if name in found]
        return loads + later


def check(text: str, *, whole: bool = True) -> Page:
    """Fails on anything that a page must not be."""
    page = Page(text)
    for tag, found in page.tags:
        assert "style" not in found and not any(name.startswith("on") for name in found), (tag, found)
        assert tag not in ("style", "iframe", "object", "embed", "base"), tag
        assert tag != "script" or found.get("src", "").startswith("/static/"), found
        assert tag != "th" or found.get("scope") in ("row", "col")
        assert tag != "img" or found.get("alt")
        assert tag != "section" or found.get("aria-labelledby")
        assert found.get("tabindex") != "0" or found.get("aria-label") or tag == "pre", found
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids)), "an id is there twice"
    for _, found in page.tags:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert name not in found or found[name] in ids, found
    named = {found["for"] for found in page.all("label")}
    assert all(found.get("id") in named for found in page.all("select", "input") if found.get("type") != "hidden")
    if whole:
        names = [tag for tag, _ in page.tags]
        assert text.startswith("<!DOCTYPE html>") and ("html", {"lang": "en"}) in page.tags
        assert names.count("h1") == names.count("main") == names.count("title") == names.count("nav") == 1
        levels = [int(name[1]) for name in names if re.fullmatch(r"h\d", name)]
        assert all(after <= before + 1 for before, after in pairwise(levels)), "a heading is skipped"
        assert page.all("a")[0] == {"class": "skip", "href": "#main"} and "main" in ids
    return page


def page_of(client: TestClient, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, (path, answer.text[-300:])
    assert answer.headers["content-type"].startswith("text/html")
    return check(answer.text, whole="part=1" not in path)
