"""A report in a real browser, headless and offline: no errors, it fits a phone, and it prints."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from report_lab import KINDS
from waiting import PATIENT_S

from moevolve.search.report.contents import gather
from moevolve.search.report.page import render_page
from moevolve.store.repository import Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--enable-logging=stderr", "--v=0", "--hide-scrollbars"),
)
# Added to a copy of the page: pages themselves have no scripts. Windows have a least width, frames have none.
MEASURE = """<script>addEventListener("load", () => {
const root = document.documentElement, drawings = [...document.querySelectorAll("figure svg")];
const flat = drawings.filter(each => each.getBoundingClientRect().height < 50);
parent.postMessage([name, innerWidth, root.scrollWidth, drawings.length, flat.length].join(), "*");
})</script></body>"""
COLLECT = """<!DOCTYPE html><script>
const root = document.documentElement;
root.dataset.measured = "";
addEventListener("message", event => { root.dataset.measured += event.data + ";"; });
</script>"""
FRAME = '<iframe name="{0}" src="{0}.html" width="{1}" height="900" style="border: 0"></iframe>'
Browse = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    def run(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=True)

    return run


def test_pages_fit_a_phone_and_a_desk(all_kinds: str, browse: Browse, tmp_path: Path) -> None:
    pages, frames = {}, COLLECT
    with Store.open(all_kinds) as store:
        for kind in KINDS:
            pages[kind] = render_page(gather(store, kind))
            (tmp_path / f"{kind}.html").write_text(pages[kind].replace("</body>", MEASURE), encoding="utf-8")
            frames += "".join(FRAME.format(kind, width) for width in (390, 1280))
    (tmp_path / "frames.html").write_text(frames)
    done = browse(tmp_path / "frames.html", "--virtual-time-budget=3000", "--dump-dom")
    found = re.search(r'data-measured="([\w,;]+)"', done.stdout)
    assert found is not None, done.stdout[-500:]
    seen = set()
    for measured in found[1].rstrip(";").split(";"):
        kind, *numbers = measured.split(",")
        inner, scrolled, figures, short = map(int, numbers)
        assert scrolled <= inner, f"{kind} is {scrolled} pixels wide at {inner}"
        assert figures == pages[kind].count("<figure") >= 3 and short == 0, kind
        seen.add((kind, inner))
    assert seen == {(kind, width) for kind in KINDS for width in (390, 1280)}
    assert "CONSOLE" not in done.stderr, done.stderr


def test_a_page_is_printed(all_kinds: str, browse: Browse, tmp_path: Path) -> None:
    page, printed = tmp_path / "report.html", tmp_path / "report.pdf"
    with Store.open(all_kinds) as store:
        page.write_text(render_page(gather(store, KINDS[0])), encoding="utf-8")
    done = browse(page, "--no-pdf-header-footer", f"--print-to-pdf={printed}")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert printed.read_bytes().startswith(b"%PDF")
    assert printed.stat().st_size > 20_000
