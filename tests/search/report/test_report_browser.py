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
parent.postMessage([innerWidth, root.scrollWidth, drawings.length, flat.length].join(), "*");
})</script></body>"""
FRAME = """<!DOCTYPE html><script>
addEventListener("message", event => { document.documentElement.dataset.measured = event.data; });
</script><iframe src="measured.html" width="WIDTH" height="900" style="border: 0"></iframe>"""
Browse = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    def run(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=True)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_a_phone_and_a_desk(all_kinds: str, browse: Browse, tmp_path: Path, kind: str) -> None:
    page, frame = tmp_path / "report.html", tmp_path / "frame.html"
    with Store.open(all_kinds) as store:
        page.write_text(render_page(gather(store, kind)), encoding="utf-8")
    (tmp_path / "measured.html").write_text(page.read_text().replace("</body>", MEASURE))
    for width in (390, 1280):
        frame.write_text(FRAME.replace("WIDTH", str(width)))
        done = browse(frame, "--virtual-time-budget=3000", "--dump-dom")
        found = re.search(r'data-measured="([\d,]+)"', done.stdout)
        assert found is not None, done.stdout[-500:]
        inner, scrolled, figures, short = map(int, found[1].split(","))
        assert inner == width and scrolled <= width, f"{scrolled} pixels wide at {width}"
        assert figures == page.read_text().count("<figure") >= 3 and short == 0
        assert "CONSOLE" not in done.stderr, done.stderr
    printed = tmp_path / "report.pdf"
    done = browse(page, "--no-pdf-header-footer", f"--print-to-pdf={printed}")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert printed.read_bytes().startswith(b"%PDF")
    assert printed.stat().st_size > 20_000
