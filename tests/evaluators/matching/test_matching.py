"""The rules of matchers, and that a decided answer stays decided."""

from __future__ import annotations

import pytest
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.evaluators.matching.base import cut, settled_part
from moevolve.evaluators.matching.general import squad_tokens, token_f1
from moevolve.evaluators.matching.registry import MATCHERS, make_matcher
from moevolve.evaluators.types import Example, Matching

LETTERS = Example("p", ("B",), ("A", "B", "C"))
WORDS = Example("p", ("not entailment", "Yes."), ("entailment", "not entailment", "Yes.", "no"))


def test_option_finds_the_letter_that_stands_alone_and_takes_nothing_else() -> None:
    matcher = make_matcher(Matching("option"))
    right = ("B", " B", "\n\nB.", "(B)", "Answer: B", "**B**", "The option is B, not A", "b? B!", "B\nA")
    assert [matcher.match(answer, LETTERS) for answer in right] == [1.0] * len(right)
    wrong = ("A", "", "Both", "b", "A or B", "D", "B2", "\nA\nB", "none\nB", "AB")
    assert not any(matcher.match(answer, LETTERS) for answer in wrong)


def test_option_is_decided_once_the_letter_is_complete() -> None:
    matcher = make_matcher(Matching("option"))
    assert all(matcher.decided(text, LETTERS) for text in (" B.", " A ", "none\n"))
    # `Both` may follow, and a byte-level token can end within a character, whose text changes with the next one.
    assert not any(matcher.decided(text, LETTERS) for text in (" B", "\n\n", "B\ufffd"))


def test_capital_takes_the_first_capital_and_decides_at_once() -> None:
    matcher = make_matcher(Matching("capital"))
    assert [matcher.match(text, LETTERS) for text in (" B", "so B", "Both", "The B", "A B", "b")] == [1, 1, 1, 0, 0, 0]
    assert [matcher.decided(text, LETTERS) for text in (" B", "so B", "T", "so", "")] == [True] * 3 + [False] * 2


GOLD_SUM = Example("p", ("She sold 1,200 - 200 = <<1200-200=1000>>1000 of 5.\n#### 1,000",))


def test_number_is_what_stands_behind_the_mark_or_else_last() -> None:
    matcher = make_matcher(Matching("number", ("\n\n",)))
    right = ("#### 1000", "so\n#### $1,000.00", "7 #### 1000.\n#### 3", "#### the answer is 1000 of 7", "in all $1,000")
    assert [matcher.match(answer, GOLD_SUM) for answer in (*right, "2000-1000.")] == [1.0] * 6
    wrong = ("", "####", "#### 100", "1000\n#### 1000.5", "-1000", "1000, or 7", "one thousand")
    assert not any(matcher.match(answer, GOLD_SUM) for answer in wrong)


def test_number_is_decided_once_it_is_complete_behind_the_mark() -> None:
    matcher = make_matcher(Matching("number", ("\n\n",)))
    undecided = ("1000", "1000 and", "#### 1", "#### 1,", "#### 1000.", "#### $", "7 ####")
    assert not any(matcher.decided(text, GOLD_SUM) for text in undecided)
    assert all(matcher.decided(text, GOLD_SUM) for text in ("#### 1000 ", "#### 7.5 x", "#### 7. x", "1000\n\n"))
    assert "'none'" in (matcher.problem(Example("p", ("none",))) or "")


def test_exact_ignores_case_space_and_closing_punctuation_only() -> None:
    matcher = make_matcher(Matching("exact"))
    gold = Example("p", ("yellow wool  Shirt", "12"))
    assert [matcher.match(t, gold) for t in (" Yellow wool shirt.", "yellow\twool shirt\nmore", "12!")] == [1, 1, 1]
    assert [matcher.match(t, gold) for t in ("a yellow wool shirt", "yellow wool", "12.5", "")] == [0, 0, 0, 0]
    assert matcher.decided("red", gold)
    assert not matcher.decided("Yellow w", gold)
    assert not matcher.decided("12.", gold)
    assert matcher.decided("12.5", gold)
    assert make_matcher(Matching("exact")).problem(Example("p", ("...",))) is not None


def test_squad_rules_on_known_values() -> None:
    """Values of the official SQuAD script's functions."""
    assert squad_tokens("The  U.S. Army's a-b, an  Apple!") == ("us", "armys", "ab", "apple")
    assert token_f1(squad_tokens("the cat sat on the mat"), squad_tokens("a cat on a mat")) == pytest.approx(6 / 7)
    assert token_f1(("x", "x", "y"), ("x", "z")) == pytest.approx(0.4)
    assert token_f1((), ()) == 1.0
    assert token_f1((), ("x",)) == 0.0
    f1, em = make_matcher(Matching("f1")), make_matcher(Matching("em"))
    gold = Example("p", ("Denver Broncos", "the Broncos"))
    assert f1.match("Denver's Broncos won", gold) == pytest.approx(0.5)
    assert f1.match("Broncos!", gold) == em.match("Broncos!", gold) == 1.0
    assert em.match("Denver", gold) == 0.0
    assert em.decided("Seattle ", gold)
    assert not em.decided("Seattle", gold)
    assert not em.decided("The Denver ", gold)


def test_phrases() -> None:
    contains = make_matcher(Matching("contains"))
    gold = Example("p", ("New York",), ())
    assert contains.match("It was in new york, I think", gold) == 1.0
    assert contains.match("It was in New Yorkshire", gold) == 0.0
    assert contains.decided("It was New York City", gold)
    assert not contains.decided("It was New York", gold)


def test_cut_at_the_stop_that_is_completed_first() -> None:
    assert cut("  one\ntwo", ("\n",)) == ("one", True)
    assert cut("\n\n", ("\n",)) == ("", False)
    assert cut("xx\ny", ("\n", "xx\ny")) == ("xx", True)
    assert cut("abcd", ("bcd", "cd")) == ("a", True)
    assert cut("one", ()) == ("one", False)
    assert settled_part("answer EN", ("END",)) == "answer "
    assert settled_part("answer", ("END", "\n")) == "answer"


# A small alphabet rich in what the rules look at: choice letters, articles, stops, sigma, punctuation.
_PIECES = [
    *("A", "B", "C", "a", "an", "the", "entail", "ment", "entailment", "not", "no", "Yes", "yes", "Σ", "İ", "ß", "é"),
    *(".", ",", "'", "-", "(", ")", " ", " ", "\n", "E", "N", "D", "END", "\t", "_", "1", "####"),
    *("Answer: ", "Question:", "answer is", "\x1c", "\u2003", "\ufffd"),
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join) | st.text(max_size=6)
_STOPS = st.lists(st.sampled_from(["\n", "END", "\n\n", ".", "NDA", "a"]), max_size=3, unique=True).map(tuple)
_WORD_EXAMPLES = st.sampled_from(
    [
        WORDS,
        Example("p", ("no",), ("no", "not", "yes a no")),
        Example("p", ("Yes, a no.",), ("Yes, a no.",)),
        Example("p", ("entailment the", "σ"), ("entailment the", "B")),
    ]
)


def _suiting(kind: str, words: Example) -> Example:
    if kind in ("option", "capital", "eep-option"):
        return LETTERS
    return Example("p", ("#### -1",)) if kind in ("number", "eep-gsm8k") else words


@pytest.mark.parametrize("kind", sorted(MATCHERS))
@settings(max_examples=30, deadline=None)
@given(text=_TEXTS, continuation=_TEXTS, stop=_STOPS, words=_WORD_EXAMPLES)
@case(text="answer EN", continuation="D", stop=("END",), words=WORDS)
@case(text="no ", continuation="", stop=("\n",), words=WORDS)
def test_decided_means_no_continuation_matters_and_a_stop_string_decides(
    kind: str, text: str, continuation: str, stop: tuple[str, ...], words: Example
) -> None:
    example = _suiting(kind, words)
    program = ("same", "def same(answer, expected): return answer == expected") if kind == "function" else ()
    matcher = make_matcher(Matching(kind, stop, *program))
    now = matcher.match(text, example)
    assert 0.0 <= now <= 1.0
    if matcher.decided(text, example):
        assert matcher.match(text + continuation, example) == now
        assert matcher.decided(text + continuation, example)
    assert make_matcher(Matching(kind, ("\n",), *program)).decided(text + "x\n", example)


def test_examples_a_matcher_can_not_score() -> None:
    assert make_matcher(Matching("option")).problem(Example("p", ("yes",), ("yes", "no"))) is not None
    assert make_matcher(Matching("option")).problem(Example("p", ("A",))) is not None
    for choices in (("A", "BC"), ("A", "b"), ("A", "")):
        problem = make_matcher(Matching("option")).problem(Example("p", ("A",), choices))
        assert problem == f"choices must be single capital letters, got {choices[1]!r}"
    assert make_matcher(Matching("em")).problem(Example("p", ("The",))) is not None
    assert make_matcher(Matching("contains")).problem(Example("p", ("the",))) is not None
    assert all(make_matcher(Matching(kind)).problem(LETTERS) is None for kind in ("option", "capital", "exact"))
