"""A search by perplexity is shown in perplexities, on every surface, and never as a score in %."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands_here import run_command
from report_lab import finished
from starlette.testclient import TestClient

from moevolve.evaluators.scales import SCALES
from moevolve.search.config.files import load_run_config
from moevolve.search.interface.checkpoints.export import scores_of
from moevolve.search.interface.progress import describe
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.server.app import make_app
from moevolve.search.server.settings import ServerSettings
from moevolve.store.records import Progress
from moevolve.store.repository import Store

IN_PERCENT = re.compile(r"in %|\[%\]|scores? \d+\.\d|\d % on|has \d+\.\d %|points")
"""Words that say that a number is a score in %, or a difference of such scores."""


@dataclass(frozen=True)
class Searched:
    """A finished search by perplexity.

    Attributes:
        best, task: Reference of its winner, and the name of its task.
        shown: Perplexity of the winner on `search`, in the words of tables.
    """

    folder: Path
    url: str
    best: str
    task: str
    shown: str
    table: FinalTable


@pytest.fixture(scope="module")
def searched(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    folder = tmp_path_factory.mktemp("perplexity")
    url = f"sqlite:///{folder / 'moevolve.db'}"
    run = load_run_config(tiny.write_run(folder / "run.yaml", "texts", tasks=[f"{tiny.task}@perplexity"]))
    with Store.open(url) as store:
        finished(store, run)
        record = store.search("texts")
        table = build_final_table(store, record, run, store.history(record.id))
    assert table.winner is not None and table.best is not None
    score = table.best.score(table.tasks[0], "search")
    assert score is not None
    return Searched(folder, url, table.winner, table.tasks[0], SCALES["perplexity"].text(score.score), table)


@pytest.fixture(scope="module")
def client(searched: Searched) -> Iterator[TestClient]:
    with Store.open(searched.url) as store:
        settings = ServerSettings(store=store.url, logs=searched.folder / "logs")
        yield TestClient(make_app(store, settings), base_url="http://localhost")


@pytest.mark.parametrize(
    ("arguments", "has_winner"),
    [
        (["best", "--task", "TASK"], True),
        (["searches"], False),  # its best on search, which another one may be
        (["lineage", "BEST"], True),
        (["pareto", "TASK"], False),
        (["show", "BEST"], True),
        (["compare", "texts"], True),
        (["effects", "texts"], False),
        (["evaluate", "BEST", "--task", "TASK", "--split", "search"], True),
        (["answers", "BEST", "--task", "TASK", "--limit", "3"], False),
        (["report", "texts", "-o", "report.html"], True),
        (["plot", "texts", "-o", "plot.svg"], False),
    ],
    ids=lambda value: "-".join(value[:1]) if isinstance(value, list) else "",
)
def test_commands(searched: Searched, arguments: list[str], has_winner: bool) -> None:
    named = {"BEST": searched.best, "TASK": searched.task}
    result = run_command(searched.folder, *(named.get(each, each) for each in arguments), "--store", searched.url)
    assert result.returncode == 0, result.stderr
    written = searched.folder / arguments[-1]
    text = written.read_text() if written.suffix in (".html", ".svg") else result.stdout
    check(text, searched.shown if has_winner else "")


@pytest.mark.parametrize(
    "page",
    [
        *("/", "/best", "/pareto?task=TASK", "/compare?searches=texts"),
        *("/searches/texts", "/searches/texts/now", "/searches/texts/standings"),
        *("/searches/texts/individuals", "/searches/texts/effects", "/searches/texts/events"),
        *("/individuals/BEST", "/individuals/BEST/lineage"),
    ],
)
def test_pages(searched: Searched, client: TestClient, page: str) -> None:
    found = client.get(page.replace("BEST", searched.best).replace("TASK", searched.task))
    assert found.status_code == 200, found.text
    check(found.text, "")


def test_progress_and_cards(searched: Searched) -> None:
    progress = Progress(1, 2, "prune", (3, 0.0529), 0.1, 0, 0, 0, None, None, "perplexity")
    assert describe(progress) == "best 18.90 ppl (#3), full 10.00 ppl"
    with Store.open(searched.url) as store:
        texts = [each.text for each in store.latest_events(store.search("texts").id) if each.kind == "best"]
        scores = scores_of(store, store.individual(searched.best).evaluations)
    assert texts and all(text.endswith(" ppl") for text in texts)
    assert all(score.scale == "perplexity" and score.cells[0].endswith(" ppl") for score in scores)


def check(text: str, shown: str) -> None:
    """The text has perplexities, and the one given, and nothing that calls them a score in %."""
    found = re.sub(r"\s+", " ", re.sub(r"<style.*?</style>|<script.*?</script>", "", text, flags=re.DOTALL))
    assert ("ppl" in found or "perplexit" in found.lower()) and shown in found
    assert not (wrong := IN_PERCENT.search(found)), found[max(0, wrong.start() - 80) : wrong.end() + 80]
