"""Our matchers compared with the EEP authors' rules, written again without regular expressions."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.types import Example, Matching

# --- What their code does -------------------------------------------------------------------------------------------

# Patterns of an option letter in order of precedence: single characters, `~` for white space, `@` for a letter, `(..)`
# for one of several characters; a following `?` makes it optional. `^` and `$` are the ends, `+` a run without white
# space before a `。` or the end, `*` the rest of the last line, `!` any character but a line break.
PLACES = """
答案是?~?@ | 答案是?~?：@ | 答案是?~?:@ | 答案应该?是~?@ | 答案应该?选~?@ | 答案为~?@ | 答案选~?@ | 选择?~?@
故选?~?@只有选?项?~?@~?是?对 | 只有选?项?~?@~?是?错 | 只有选?项?~?@~?不?正确 | 只有选?项?~?@~?错误
说法不?对选?项?的?是~?@ | 说法不?正确选?项?的?是~?@ | 说法错误选?项?的?是~?@ | @~?是正确的 | @~?是正确答案
选项~?@~?正确 | 所以答~?@ | 所以~?@(.。$)?$ | 所有~?@(.。$)?$ | (~，：:,)@(。，,.)?$ | (~，,：:)(故即)@(。.)?$
(~，,：:)因此@(。.)?$ | (是为。)~?@(。.)?$ | 因此~?@(。.)?$ | 显然~?@(。.)?$ | 答案是~?+ | 答案应该是~?+ | 答案为~?+
(Tt)he answer is \\(?@\\)? | (Tt)he answer is option \\(?@\\)? | (Tt)he correct answer is \\(?@\\)?
(Tt)he correct answer is option \\(?@\\)? | (Tt)he answer to the question is \\(?@\\)? | ^选项~?@ | ^@~?选?项
"""
LAST_PLACES = ["1!~?*", "1!~?@(.。$)?$", "@:", "@"]
Test = Callable[[str], bool]


def is_space(character: str) -> bool:
    return character.isspace()


def parsed(place: str, letters: str) -> list[tuple[Test | str, bool]]:
    """The items of a pattern, each with a flag for optional ones."""
    items: list[tuple[Test | str, bool]] = []
    i = 0
    while i < len(place):
        character, i = place[i], i + 1
        if character == "\\":
            character, i = place[i], i + 1
            test: Test | str = character.__eq__
        elif character == "(":
            end = place.index(")", i)
            within, i = place[i:end], end + 1
            test = lambda c, within=within: (c in within and c != "~") or ("~" in within and is_space(c))  # noqa: E731
        elif character in "^$+*":
            test = character
        elif character == "~":
            test = is_space
        elif character == "@":
            test = letters.__contains__
        elif character == "!":
            test = lambda c: c != "\n"  # noqa: E731
        else:
            test = character.__eq__
        optional = place[i : i + 1] == "?"
        i += optional
        items.append((test, optional))
    return items


def met(text: str, at: int, test: Test | str) -> Iterator[int]:
    """Possible ends of one item that matches at a position, longest first."""
    if test == "^":
        found = [at] if at == 0 else []
    elif test == "$":
        found = [at] if text[at:] in ("", "\n") else []
    elif test == "*":
        found = [at + len(text[at:].removesuffix("\n"))] if "\n" not in text[at:].removesuffix("\n") else []
    elif test == "+":
        found = list(runs(text, at))
    else:
        assert callable(test)
        found = [at + 1] if at < len(text) and test(text[at]) else []
    yield from found


def runs(text: str, at: int) -> Iterator[int]:
    end = next((i for i in range(at, len(text)) if is_space(text[i])), len(text))
    for i in range(end, at, -1):
        if text[i : i + 1] == "。":
            yield i + 1
        if text[i:] in ("", "\n"):
            yield i


def ends(text: str, at: int, items: list[tuple[Test | str, bool]]) -> Iterator[int]:
    """Possible ends of items that match from a position on."""
    if not items:
        yield at
        return
    (test, optional), rest = items[0], items[1:]
    for end in met(text, at, test):
        yield from ends(text, end, rest)
    if optional:
        yield from ends(text, at, rest)


def first_found(text: str, place: str, letters: str) -> str | None:
    items = parsed(place, letters)
    for start in range(len(text) + 1):
        for end in ends(text, start, items):
            return text[start:end]
    return None


def option(text: str, letters: str) -> str:
    """`first_option_postprocess`."""
    if len(text) > 1 and text[0] in letters and (is_space(text[1]) or text[1] in "，：:,"):
        return text[0]
    places = [place for line in PLACES.strip().split("\n") for place in line.split(" | ")]
    for place in places:
        found = first_found(text, place, letters)
        if found is not None and (letter := lowest(found, letters)):
            return letter
    if found := alone(text, letters):
        return found
    for place in LAST_PLACES:
        found = first_found(text, place, letters)
        if found is not None and (letter := lowest(found, letters)):
            return letter
    return ""


def alone(text: str, letters: str) -> str:
    """A letter after white space or at the beginning, followed by punctuation or space, or else by the end."""
    opens = [i for i, c in enumerate(text) if c in letters and (i == 0 or is_space(text[i - 1]))]
    for i in opens:
        if i + 1 < len(text) and (is_space(text[i + 1]) or text[i + 1] in "。，,：:.$"):
            return text[i]
    return next((text[i] for i in opens if i + 1 == len(text) or is_space(text[i + 1])), "")


def lowest(found: str, letters: str) -> str:
    return next((letter for letter in letters if letter in found), "")


def capital(text: str) -> str:
    """`first_capital_postprocess`."""
    return next((c for c in text if c.isupper()), "")


def clean(text: str) -> str:
    """Text without punctuation and articles, with single spaces."""
    kept = "".join(c for c in text if c.isalnum() or c == "_" or is_space(c))
    return " ".join(word for word in kept.split() if word.lower() not in ("a", "an", "the"))


def clause(text: str) -> str:
    """`general_postprocess`."""
    return clean(text[: min((text.find(c) for c in "\n.," if c in text), default=len(text))])


def last_number(text: str) -> str:
    """`gsm8k_postprocess`."""
    text, found, i = text.split("Question:", maxsplit=1)[0], "NULL", 0
    while i < len(text):
        start = i
        i += text[i] == "-" and text[i + 1 : i + 2].isdecimal()
        if not text[i].isdecimal():
            i = start + 1
            continue
        while text[i : i + 1].isdecimal():
            i += 1
        if text[i : i + 1] == "." and text[i + 1 : i + 2].isdecimal():
            i += 1
            while text[i : i + 1].isdecimal():
                i += 1
        found = text[start:i]
    return found


def contained(prediction: str, references: tuple[str, ...]) -> bool:
    """`EMEvaluator` after the authors' change."""
    return any(accepted in clause(prediction) for r in references for accepted in (clause(r), r))


def record(text: str, references: tuple[str, ...]) -> bool:
    return contained(text.strip().split("\n")[0].replace("Answer: ", "").strip(), references)


def drop(text: str, references: tuple[str, ...]) -> bool:
    return contained(last_number(text), references)


def squad2(text: str, references: tuple[str, ...]) -> bool:
    """`SQuAD20Evaluator`."""
    line = text.split("\n", maxsplit=1)[0].lower()
    line = line[line.rfind("answer is") + len("answer is") :] if "answer is" in line else line
    return any(clean(reference.split("\n")[0]).lower() in clause(line) for reference in references)


def gsm8k(text: str, references: tuple[str, ...]) -> bool:
    """`Gsm8kEvaluator` with its two post-processors."""
    expected = references[0].split("#### ")[1].replace(",", "")
    found = last_number(text)
    return found == expected or (found != "NULL" and abs(float(found) - int(expected)) < 1e-6)


# --- Both on the same answers ---------------------------------------------------------------------------------------

THREE, TWO = Example("p", ("B",), ("A", "B", "C")), Example("p", ("A",), ("A", "B"))
NAMES = Example("p", ("U.S. Army", "the Army", "10th century"))
SPANS = Example("p", ("10th century", "Impossible to answer", "tenth"))
NUMBERS = Example("p", ("2", "14.8", "5 May 1999"))
SUM = Example("p", ("1200 - 200 = 1000.\n#### 1,000",))

RULES: dict[str, tuple[tuple[Example, ...], Callable[[str, Example], bool]]] = {
    "capital": ((THREE, TWO), lambda text, e: capital(text) in e.references),
    "eep-option": ((THREE, TWO), lambda text, e: option(text, "".join(e.choices)) in e.references),
    "eep-record": ((NAMES,), lambda text, e: record(text, e.references)),
    "eep-drop": ((NUMBERS,), lambda text, e: drop(text, e.references)),
    "eep-squad2": ((SPANS, NAMES), lambda text, e: squad2(text, e.references)),
    "eep-gsm8k": ((SUM,), lambda text, e: gsm8k(text, e.references)),
}
STOPS: dict[str, tuple[str, ...]] = {
    "eep-drop": ("Question:",),
    "eep-gsm8k": ("Question:",),
    "eep-squad2": ("\n",),
}

# At least one answer for each rule, and answers as models write them.
BY_HAND = (
    "|A|B| A|A.|B.|A,|A:|A\n|\nA|A B|AB|B A|(A)|(B)|b|Both|D|A)|The answer is A|The answer is B.|"
    "The answer is (B) No|the answer is option A.|Answer: B|Answer:A|The correct answer is B because A is wrong|"
    "the correct answer is option (A)|The answer is A or B|The answer to the question is A.|A. Yes, the answer is B|"
    "B. No\n\nExplanation: A|It is A, I think.|I choose A|I choose A.\n|so: B|No, B: it is|1. A|1. none\n2. B|"
    "1. B and A|10 B|xA:|xAx|答案是A|答案是： B|答案：B|答案应该是 A|答案应选B|答案为A。|选择B|选 A|故选A|"
    "故选B只有A对|故A只有选项 B 是对|只有B错|只有选项A不正确|只有A正确|只有项 B错误|说法不对的是A|"
    "说法不正确选项的是 B|说法错误的是B|A是正确的|B 是正确答案|选项 A 正确|所以答B|所以A。|所有 B$|，A。|，故B|,即A.|"
    ":因此B|因此 A。|显然B.|为 A|答案是xB|答案是xB。A|答案应该是不A|答案为 CB。|选项B|A项|A 选项|a B c|A$|A A|x A|"
    "x A y B.|A\tB|A，B|A: B|1.\nA|21. B\n|1?B|1. B\nA|NULL|no number|5|-5|14.8|So the answer is 14.8.|12|12.|1,000|"
    "1,000.|5-3=2. So 2|3 of 1999|2 Question: 7|Question:2|2 Question|1000.0|1000.0000001|999.9999999|1000 -|--2|- 2|"
    "2-2|x2y|.5|5.|1000.5.2|٢|2\nQuestion: 3|The answer is 1000\nQuestion: 4|14|2.9|"
    "The answer is in the 10th century.|in 10th century, I think|10th  CENTURY|10th, century|the 10th a century|"
    "answer is|Answer is: Tenth|The answer is no. The answer is tenth|\ntenth|x\ntenth| tenth|impossible|"
    "It is impossible to answer.|The answer is: impossible to answer|IMPOSSIBLE to the answer|tenth answer is x|"
    "U.S. Army|US Army|Answer: US Army|Answer: the Army|Answer:Army|U|the U|Army|an Army|army|Answer: |Answer: \nU|"
    "x, US Army|x. US Army|\n\n US Army\nx|USAnswer:  Army|U-S Army|the|A an the"
)


def ours(kind: str, text: str, example: Example) -> bool:
    return make_matcher(Matching(kind, STOPS.get(kind, ()))).match(text, example) == 1.0


@pytest.mark.parametrize("kind", RULES)
def test_answers_written_by_hand(kind: str) -> None:
    examples, theirs = RULES[kind]
    found = {(text, e): ours(kind, text, e) for text in BY_HAND.split("|") for e in examples}
    assert found == {(text, e): theirs(text, e) for text, e in found}
    assert {True, False} == set(found.values())


_PIECES = [
    *("A", "B", "C", "D", "a", "the", "An", "1", "2", "14.8", "1,000", "10th century", "tenth", "U.S. Army", "Army"),
    *(".", ",", ":", "：", "。", "，", "$", "-", "(", ")", " ", " ", "\n", "\t", "\u2003", "_", "é", "Σ"),
    *("The answer is ", "the correct answer is option ", "Answer: ", "answer is", "Question:", "1. ", "####"),
    *(
        "答案",
        "是",
        "为",
        "应",
        "该",
        "选",
        "项",
        "只有",
        "正确",
        "错",
        "不",
        "说法",
        "对",
        "的",
        "所以",
        "因此",
        "故",
        "即",
    ),
]
_ANSWERS = st.lists(st.sampled_from(_PIECES), max_size=9).map("".join) | st.text(string.printable, max_size=8)


@pytest.mark.parametrize("kind", RULES)
@settings(max_examples=40, deadline=None)
@given(text=_ANSWERS, continuation=_ANSWERS)
def test_answers_by_chance(kind: str, text: str, continuation: str) -> None:
    examples, theirs = RULES[kind]
    matcher = make_matcher(Matching(kind, STOPS.get(kind, ())))
    for example in examples:
        assert ours(kind, text, example) == theirs(text, example)
        if matcher.decided(text, example):
            assert theirs(text + continuation, example) == theirs(text, example)


def test_decoding_may_stop_and_references_are_checked() -> None:
    for kind, example, text in (
        ("eep-option", THREE, "B, "),
        ("eep-record", NAMES, "The Army."),
        ("eep-record", NAMES, "x\ny"),
        ("eep-drop", NUMBERS, "So 2. Question:"),
        ("eep-squad2", SPANS, "tenth\n"),
        ("eep-gsm8k", SUM, "1000\n\nQuestion:"),
    ):
        matcher = make_matcher(Matching(kind, STOPS.get(kind, ())))
        assert matcher.decided(text, example) and not matcher.decided(text[:-2], example), (kind, text)
        assert matcher.problem(example) is None
    assert "no whole number" in str(matcher.problem(Example("p", ("#### 1.5",))))
