"""Answers scored by a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import Example, Matching
from moevolve.evaluators.yaml_files import CODE_VARIABLE

SHARE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Words:
    text: str

def share(answer, expected):
    wanted = set(Words(expected).text.split())
    return len(wanted & set(answer.split())) / len(wanted)
"""


def score(source: str, answer: str, *references: str, name: str = "share") -> float:
    return make_matcher(Matching("function", (), name, source)).match(answer, Example("p", references))


def test_the_function_scores_the_answer_against_every_reference() -> None:
    assert score(SHARE, "a b", "a c") == 0.5
    assert score(SHARE, "a b", "c d", "a b e f") == 0.5
    matcher = make_matcher(Matching("function", ("\n",), "share", SHARE))
    assert matcher.match(" a b\nc", Example("p", ("a b c",))) == pytest.approx(2 / 3)
    assert not matcher.decided("a b", Example("p", ("a b",))) and matcher.decided("a b\n", Example("p", ("a b",)))


WRONG = {
    "not Python": ("def share(", "its file can't be run: "),
    "another name": ("def other(answer, expected): return 1", "its file has no function of this name"),
    "an error": ("def share(answer, expected): return 1 / 0", "of the answer 'a b': division by zero; let it return 0"),
    "no number": ("def share(answer, expected): return None", "of the answer 'a b': TypeError"),
    "too large": ("def share(answer, expected): return 75", "of the answer 'a b': it must be in [0, 1], got 75.0"),
    "nothing": ("def share(answer, expected): return float('nan')", "it must be in [0, 1], got nan"),
}


@pytest.mark.parametrize(("source", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_a_function_is_said(source: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        score(source, "a b", "a b")
    assert str(caught.value).startswith("metric share") and said in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def task(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a task with the function of a source text, in another folder than this process's."""

    def write(source: str) -> Path:
        (tmp_path / "share.py").write_text(source)
        (tmp_path / "rows.jsonl").write_text('{"q": "say a b", "a": "a b"}\n')
        path = tmp_path / "words.yaml"
        path.write_text(
            "source: {files: {all: rows.jsonl}}\nsplits: {search: {from: all}}\nprompt: '{{ q }}'\nanswer: '{{ a }}'\n"
            "matching: {function: 'share.py:share'}\n"
        )
        return path

    return write


def test_the_files_content_is_a_part_of_the_task(task: Callable[[str], Path]) -> None:
    path = task(SHARE)
    split = prepare_split(load_task(path), "search")
    assert split.matching == Matching("function", (), "share", SHARE), "workers need no file"
    task(SHARE + "# changed\n")
    assert prepare_split(load_task(path), "search").fingerprint != split.fingerprint


def test_fingerprints_of_other_tasks_do_not_depend_on_functions(task: Callable[[str], Path]) -> None:
    path = task(SHARE)
    path.write_text(path.read_text().replace("matching: {function: 'share.py:share'}\n", ""))
    split = prepare_split(load_task(path), "search")
    assert split.fingerprint == "62e47910bbf795fb8249fbac05d6330dd6acfa6d5bf7a8e82312899a896251fc"


def test_a_row_that_the_function_cannot_score_is_named(task: Callable[[str], Path]) -> None:
    path = task("def share(answer, expected): return len(answer)")
    said = r"rows\.jsonl:1: metric share of the answer 'a b': it must be in \[0, 1\], got 3\.0"
    with pytest.raises(UserError, match=said):
        prepare_split(load_task(path), "search")


def test_servers_load_no_programs(task: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = task(SHARE)
    monkeypatch.setenv(CODE_VARIABLE, "refuse")
    with pytest.raises(UserError, match=r"field matching\.function: servers"):
        load_task(path)


@pytest.mark.parametrize("given", ["share.py", "share:share", "share.py:", "share.py:a b"])
def test_a_function_is_given_by_file_and_name(given: str, task: Callable[[str], Path]) -> None:
    path = task(SHARE)
    path.write_text(path.read_text().replace("share.py:share", given))
    with pytest.raises(UserError, match=r"give FILE\.py:NAME"):
        load_task(path)
