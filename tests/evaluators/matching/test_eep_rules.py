"""Our matchers on answers that a second implementation of the EEP authors' rules agreed on.

Every row of `OPTIONS` holds a part of a pattern: without the row, a change of that part goes unseen.
"""

from __future__ import annotations

import pytest

from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.types import Example, Matching

LETTERS = ("A", "B", "C")
OPTIONS = {
    "A": (
        "\nB只有A正确|B说法正确项是AB|x故A只有选项 C 对 C|\nB:故A|x C说法正确选的是 AB|tenth14.8B项$(An|B答案A|"
        "B所有A|B所以A|B答案：AB|B答案 :AB|x C 即A。|x C说法对是 Ax|x说法错误选项的是 A C|BA:|B是A。|B所以答A|"
        "\nB：A,|Bthe correct answer is (A|BA是正确的|\nB答案是 xA\n|so C 所以 A$|\nB答案应该是 xAB|A B|A，B|A:B|"
        "B所有A.|\nB：即A|B显然A.|B因此A.|BThe correct answer is A)|\nB所有A$|所以答 A C|BA 是正确的|"
        "BA 是正确答案|故 B只有A 对 C|\nBThe answer to the question is A)|BThe correct answer is option (A\n|"
        "Bthe answer is option (A)|1. A"
    ),
    "B": (
        "故C只有B是对|为 C。B|说法对选项是B C|说法错误是 B C|只有选项 B是错 C|故选B只有A对|所以Army因此B|"
        "因此A选the correct answer is option BQuestion:|\nB。C:|答案应是B C|选项B正确 C|\nB选项C|so C ,B。|"
        "so C ，B.|so C ，即B.|选项 B 正确 C|说法不对选项的是 B or A|B：A|：因此A。B|只有 B正确 C|x C所以B.\n|"
        "so C ,故B|说法错误选是B or A|so C 答案应该是xBx|x CThe answer is (B。|1. none\n2. B|21. B\n"
    ),
    "C": (
        "B只有C 错|所有 B C|只有选项C 不正确 or A|Bthe answer is CB|B显然C|BThe answer is option Cx|B为C.|"
        "\nB:C，|答案为CB|B选择 CB|答案是 CB|答案是 ：CB|BC是正确答案|答案应该是 CB|x C答案是:CB|so C 显然 B。x|"
        "\nBthe answer to the question is (C|C,B|\nB所以C。|B所有C。\n|答案为 CB。|B所有 C$B|x C:即A。。|"
        ",Army\nC：|B说法不正确的是Cx"
    ),
    "": "|b|D|no letter",
}
"""Answers by the option that they settle on, with a bar between them; by nothing those without one."""

NAMES = Example("p", ("U.S. Army", "the Army", "10th century"))
SPANS = Example("p", ("10th century", "Impossible to answer", "tenth"))
NUMBERS = Example("p", ("2", "14.8", "5 May 1999"))
SUM = Example("p", ("1200 - 200 = 1000.\n#### 1,000",))

# The example, stop strings, and right and wrong answers.
RULES: dict[str, tuple[Example, tuple[str, ...], str, str]] = {
    "eep-record": (
        NAMES,
        (),
        (
            "The answer is in the 10th century.|10th  CENTURY|the 10th a century|U.S. Army|Answer: US Army|Answer:Army|"
            "U|the U|an Army|\n\n US Army\nx|USAnswer:  Army|U-S Army|10th Answer: century"
        ),
        "10th, century|answer is|army|Answer: |Answer: \nU|x, US Army|x. US Army|the|A an the|x\nArmy|",
    ),
    "eep-drop": (
        NUMBERS,
        ("Question:",),
        "14.8|So the answer is 14.8.|12|12.|5-3=2. So 2|2 Question: 7|2 Question|--2|- 2|x2y|1000.5.2|14|2.9",
        "NULL|no number|5|-5|1,000|3 of 1999|Question:2|1000.0|999.9999999|.5|5.|٢|1000\nQuestion: 2|",
    ),
    "eep-squad2": (
        SPANS,
        ("\n",),
        (
            "The answer is in the 10th century.|in 10th century, I think|10th  CENTURY|the 10th a century|"
            "Answer is: Tenth|The answer is no. The answer is tenth| tenth|It is impossible to answer.|"
            "IMPOSSIBLE to the answer"
        ),
        "10th, century|answer is|\ntenth|x\ntenth|impossible|tenth answer is x|the|A an the|",
    ),
    "eep-gsm8k": (
        SUM,
        ("Question:",),
        "1000|1000.0|1000.0000001|999.9999999|1000 -|The answer is 1000\nQuestion: 4|7 or 1000",
        "NULL|no number|-1000|1,000|1000 or 7|1000.00001|1000.5.2|Question:1000|100|",
    ),
}


def test_options() -> None:
    matcher = make_matcher(Matching("eep-option", ()))
    for right, answers in OPTIONS.items():
        for text in answers.split("|"):
            found = [letter for letter in LETTERS if matcher.match(text, Example("p", (letter,), LETTERS))]
            assert found == list(right), text
    two = Example("p", ("A",), ("A", "B"))
    assert [matcher.match(text, two) for text in ("C, A", "the answer is C or A", "B A")] == [1, 1, 0]


@pytest.mark.parametrize("kind", RULES)
def test_right_and_wrong_answers(kind: str) -> None:
    example, stop, right, wrong = RULES[kind]
    matcher = make_matcher(Matching(kind, stop))
    assert [text for text in right.split("|") if not matcher.match(text, example)] == []
    assert [text for text in wrong.split("|") if matcher.match(text, example)] == []


def test_decoding_may_stop_and_references_are_checked() -> None:
    option = Example("p", ("B",), LETTERS)
    for kind, example, stop, text in (
        ("eep-option", option, (), "B, "),
        ("eep-record", NAMES, (), "The Army."),
        ("eep-record", NAMES, (), "x\ny"),
        ("eep-drop", NUMBERS, ("Question:",), "So 2. Question:"),
        ("eep-squad2", SPANS, ("\n",), "tenth\n"),
        ("eep-gsm8k", SUM, ("Question:",), "1000\n\nQuestion:"),
    ):
        matcher = make_matcher(Matching(kind, stop))
        assert matcher.decided(text, example) and not matcher.decided(text[:-2], example), (kind, text)
        assert matcher.problem(example) is None
    assert "no whole number" in str(matcher.problem(Example("p", ("#### 1.5",))))
