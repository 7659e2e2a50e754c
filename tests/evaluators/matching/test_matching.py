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


def test_articles_and_pronouns_are_no_options() -> None:
    matcher = make_matcher(Matching("option"))
    ten = Example("p", ("C",), tuple("ABCDEFGHIJ"))
    right = ("I think the answer is C.", "A good guess would be C", "I'd say C", "I\u2019m sure: C", "A letra C")
    assert [matcher.match(answer, ten) for answer in (*right, "C because I computed it")] == [1.0] * 6
    first = Example("p", ("A",), tuple("ABCDEFGHIJ"))
    right = ("A is right, not C", "A or C", "A", "A, I think", "A Paris, C Rome", "A entailment")
    assert [matcher.match(answer, first) for answer in right] == [1.0] * 6
    assert not any(matcher.decided(text, first) for text in ("A", "A ", "A i", "A is", "I think", "A good"))
    assert all(matcher.decided(text, first) for text in ("A.", "A is ", "A P", "I think C ", "A good C."))


def test_option_is_decided_once_the_letter_is_complete() -> None:
    matcher = make_matcher(Matching("option"))
    assert all(matcher.decided(text, LETTERS) for text in (" B.", " B ", "none\n"))
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


@pytest.mark.parametrize(
    ("right", "answer", "reference"),
    [
        (1, "It is 1.5 metres.", "1.5"),
        (0, "It is 15 metres.", "1.5"),
        (0, "It is 21.5 metres.", "1.5"),
        (1, "(-5)", "-5"),
        (1, "It is \u22125\u00a0°C", "-5"),
        (0, "It is 5.", "-5"),
        (0, "It is -5.", "5"),
        (1, "From 2-5 of them", "5"),
        (1, "It costs $1,000.00", "1000"),
        (1, "1\u202f000\u202f000 people", "1,000,000"),
        (1, "1.234,5 km", "1234.5"),
        (0, "1, 5 and 7", "1.5"),
        (1, "some 50 % of it", "50%"),
        (1, "some 50 percent of it", "50%"),
        (0, "some 50 people", "50%"),
        (1, "three quarters, 3/4, of it", "3/4"),
        (0, "on 3/4/2020", "3/4"),
        (0, "at 192.168.1.5", "1.5"),
        (1, "Python 3.10.", "3.10"),
        (0, "Python 3.10.", "3.1"),
        (1, "I like C#.", "C#"),
        (0, "I like C++.", "C#"),
        (0, "I like C++.", "C"),
        (1, "C++, of course", "c++"),
        (1, "(F#)", "F#"),
        (1, "on .NET, say", ".NET"),
        (0, "on the net", ".NET"),
        (1, "in the U.S.", "US"),
        (1, "in the US", "U.S."),
        (1, "J.R.R. Tolkien's", "J.R.R. Tolkien"),
        (1, "a well\u2011known one", "well-known"),
        (1, "Denver's", "Denver"),
        (1, "It was Beatles'", "The Beatles"),
        (0, "vitamin C", "vitamin A"),
        (1, "答案是北京。", "北京"),
        (1, "答えは東京です", "東京"),
        (0, "答案是南京。", "北京"),
        (1, "서울입니다", "서울"),
        (1, "เมืองหลวงคือกรุงเทพ", "กรุงเทพ"),
        (1, "उत्तर हिन्दी है", "हिन्दी"),
        (0, "की", "क"),
        (1, "cafe\u0301", "CAF\u00c9"),
        (0, "cafe\u0301", "cafe"),
        (1, "soft\u00adware", "software"),
        (1, "Это Москва.", "москва"),
        (1, "الجواب ٤٢", "42"),
    ],
)
def test_contains_reads_words_and_numbers_as_people_write_them(right: int, answer: str, reference: str) -> None:
    assert make_matcher(Matching("contains")).match(answer, Example("p", (reference,))) == right


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("The answer is $9{,}500.", "9500"),
        (r"\boxed{8{,}000} since 3 < 5", "8000"),
        (r"\boxed{\frac{3}{4}}", "0.75"),
        (r"$-\frac{3}{4}$", "-0.75"),
        (r"\dfrac12", "1/2"),
        (r"12\,500 m", "12500"),
        (r"\$29.00", "29"),
        (r"50\%", "50"),
        ("$-5$", "-5"),
        ("-$5", "-5"),
        ("It is \u22125.", "-5"),
        ("It is 1\u202f000 km.", "1000"),
        ("It is 1\u00a0000,5 km.", "1000.5"),
        ("1'000'000", "1000000"),
        ("1.234.567,8", "1234567.8"),
        ("1,00,000", "100000"),
        ("0,125", "0.125"),
        ("12,5", "12.5"),
        ("1,5,7", "7"),
        ("2.5e3", "2500"),
        ("5kg", "5"),
        ("１２", "12"),
        ("٣٫٥", "3.5"),
        ("on 1/2/2020", "2020"),
        ("气温-5度", "-5"),
        (".5", "1/2"),
        ("8-5", "5"),
        ("2e999", None),
        ("no 5/0", "0"),
    ],
)
def test_numbers_are_read_as_people_write_them(answer: str, number: str | None) -> None:
    matcher = make_matcher(Matching("number"))
    if number is not None:
        assert matcher.match(answer, Example("p", (number,))) == 1
    assert matcher.match(answer, Example("p", ("123456",))) == 0


@pytest.mark.parametrize(
    ("right", "answer", "reference"),
    [
        (1, "北京。", "北京"),
        (1, "北京」", "北京"),
        (1, "cafe\u0301", "caf\u00e9"),
        (1, "Москва…", "москва"),
        (1, "New\u00a0York", "new york"),
        (1, "don\u2019t", "don't"),
        (1, "\u22125", "-5"),
        (0, "-5", "5"),
        (0, "C++", "C#"),
        (0, "C", "C#"),
        (0, "5%", "5"),
        (0, "15", "1.5"),
    ],
)
def test_exact_ignores_how_a_text_is_composed_and_closed(right: int, answer: str, reference: str) -> None:
    assert make_matcher(Matching("exact")).match(answer, Example("p", (reference,))) == right


def test_options_stand_alone_in_every_script() -> None:
    matcher, example = make_matcher(Matching("option")), Example("p", ("C",), ("A", "B", "C"))
    assert [
        matcher.match(text, example) for text in ("答案是C。", "选Ｃ", "C++ or C", "C#", "C\u0301", "Ça", "C\u200bat")
    ] == [*(1, 1, 1, 0, 0, 0, 0)]
    assert not any(matcher.decided(text, example) for text in ("C", "C+", "C\u200b"))
    assert matcher.decided("C.", example)


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
    *(
        "5",
        "000",
        "\u202f",
        "/",
        "+",
        "#",
        "e",
        "%",
        "$",
        "\\frac{1}",
        "{2}",
        "{,}",
        "\\boxed{",
        "}",
        "\u2212",
        "\u0301",
    ),
    *("\u0345", "\u0316", "\u200b", "北", "京", "。", "한", "ᄒ", "ก", "ิ"),
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join) | st.text(max_size=6)
_STOPS = st.lists(st.sampled_from(["\n", "END", "\n\n", ".", "NDA", "a"]), max_size=3, unique=True).map(tuple)
_WORD_EXAMPLES = st.sampled_from(
    [
        WORDS,
        Example("p", ("no",), ("no", "not", "yes a no")),
        Example("p", ("Yes, a no.",), ("Yes, a no.",)),
        Example("p", ("entailment the", "σ"), ("entailment the", "B")),
        Example("p", ("C#", "1.5", "é北")),
        Example("p", ("-5", "5000", "1/5")),
    ]
)


def _suiting(kind: str, words: Example) -> Example:
    if kind in ("option", "capital", "eep-option"):
        return LETTERS
    return Example("p", ("#### -1", "5000", "15")) if kind in ("number", "eep-gsm8k") else words


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
    assert make_matcher(Matching("contains")).problem(Example("p", ("?!",))) == "'?!' has no words"
    assert all(make_matcher(Matching(kind)).problem(LETTERS) is None for kind in ("option", "capital", "exact"))
