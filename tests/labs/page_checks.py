"""What every page must be, whatever is on it: well-formed, self-contained, labelled."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

_VOID = {"meta", "link", "br", "img", "input", "hr"}
_LOADS = ("src", "srcset", "data", "action", "formaction", "poster", "background")


class _Page(HTMLParser):
    """Every tag is closed, in order; notes ids, links and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, found))
        assert not set(found) & set(_LOADS), f"{tag} loads something: {found}"
        assert not any(name.startswith("on") for name in found), f"{tag} has a script"
        if found.get("id") is not None:
            self.ids.append(str(found["id"]))
        self.links += [str(value) for name, value in attrs if name in ("href", "xlink:href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def text_of(page: str) -> str:
    """What is to be read on a page, with single spaces."""
    parser = _Page()
    parser.feed(page)
    return " ".join(" ".join(parser.text).split())


def check_page(page: str) -> None:
    """Fails on anything that a page must not be."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    assert not parser.open, f"not closed: {parser.open}"
    assert len(set(parser.ids)) == len(parser.ids), "an id is there twice"
    _check_links(page, parser)
    names = [tag for tag, _ in parser.tags]
    assert not {"script", "iframe", "object", "embed", "form", "base"} & set(names)
    assert names.count("h1") == names.count("main") == names.count("title") == 1
    assert ("html", {"lang": "en"}) in parser.tags
    assert any(found.get("name") == "viewport" for tag, found in parser.tags if tag == "meta")
    assert all(found.get("scope") in ("row", "col") for tag, found in parser.tags if tag == "th")
    assert all(found.get("role") != "img" or found.get("aria-label") for _, found in parser.tags)
    drawings = [found for tag, found in parser.tags if tag == "svg" and "aria-hidden" not in found]
    assert names.count("figure") == names.count("figcaption") == len(drawings)
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(drawing)
    for rule in ("prefers-color-scheme: dark", "@media print", "max-width"):
        assert rule in page
    levels = [int(name[1]) for name in names if re.fullmatch(r"h\d", name)]
    assert all(after <= before + 1 for before, after in pairwise(levels)), "a heading is skipped"


def _check_links(page: str, parser: _Page) -> None:
    """Every link leads to a place on the page, or holds what it links to."""
    for link in parser.links:
        assert link.startswith("data:") or (link.startswith("#") and link[1:] in parser.ids), link
    for target in re.findall(r"url\(\s*['\"]?([^)'\"]*)", page):
        assert target.startswith("#") and target[1:] in parser.ids, target
    assert "@import" not in page
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, outside
