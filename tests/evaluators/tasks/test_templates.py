"""Rendering rows as examples, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.tasks.templates import ExampleTemplate
from moevolve.evaluators.types import Example


def _template(**changes: Any) -> ExampleTemplate:
    raw = {
        "name": "t",
        "source": {"hub": "org/data"},
        "splits": {"test": {"from": "test"}},
        "prompt": "{{ question }}\n",
        "answer": "{{ answer }}",
    } | changes
    return ExampleTemplate(TaskConfig.from_mapping({k: v for k, v in raw.items() if v is not None}, "t.yaml"))


def test_text_is_rendered_as_written() -> None:
    """No HTML escaping, no lost newlines, no formatting of braces in the data."""
    example = _template().example({"question": "<b> & {{ x }} 'q'?", "answer": "é"}, "row 0")
    assert example == Example("<b> & {{ x }} 'q'?\n", ("é",), ())


def test_references_and_choices_as_expression_or_list() -> None:
    row = {"question": "q", "answer": "a", "more": ["b", "a"], "options": ["a", "c"]}
    assert _template(references="more", choices="options").example(row, "r") == Example("q\n", ("a", "b"), ("a", "c"))
    listed = _template(answer=None, references=["{{ answer }}", "the {{ answer }}"], choices=["a", "{{ question }}"])
    assert listed.example(row, "r") == Example("q\n", ("a", "the a"), ("a", "q"))
    either = _template(answer=None, references="more[:0] or ['none']")
    assert either.example(row, "r").references == ("none",)


def test_fields_take_the_first_path_that_exists() -> None:
    template = _template(fields={"question": ["flat", "nest.q"]})
    assert template.example({"flat": "f", "answer": "a"}, "r").prompt == "f\n"
    assert template.example({"flat": None, "nest": {"q": "n"}, "answer": "a"}, "r").prompt == "n\n"
    with pytest.raises(UserError, match=r"t\.yaml: r: field fields\.question: the row has no flat or nest\.q"):
        template.example({"nest": {}, "answer": "a"}, "r")


def test_labels_accept_every_spelling_of_the_data() -> None:
    template = _template(labels={"answer": {"true": "A", "1": "A", "yes": "A", "false": "B"}})
    for value in (True, 1, "yes", "true"):
        assert template.example({"question": "q", "answer": value}, "r").references == ("A",)
    with pytest.raises(UserError, match=r"t\.yaml: file:3: `answer` is '7', labels\.answer knows: true, 1, yes, false"):
        template.example({"question": "q", "answer": 7}, "file:3")


def test_templates_and_rows_that_can_not_be_rendered() -> None:
    for changes, row, said in (
        ({"prompt": "{{ quesion }}"}, {}, "t.yaml: field prompt: row 4: 'quesion' is undefined; the row has: q"),
        ({}, {"question": None}, "field prompt: row 4: a value in it is null"),
        ({"prompt": "{{ 1 / 0 }}"}, {}, "field prompt: row 4: division by zero"),
        ({"prompt": "{{ question.__class__.__mro__ }}"}, {}, "field prompt: row 4: access to attribute '__class__'"),
        ({"references": "question"}, {}, "field references: row 4: expected a list of texts, got 'q'"),
        ({"references": "missing"}, {}, "field references: row 4: 'missing' is undefined"),
        ({}, {"answer": "  "}, "row 4: the gold answer is empty"),
        ({"choices": ["A", "B"]}, {}, "row 4: the gold answer 'a' is none of the choices 'A', 'B'"),
    ):
        template = _template(**changes)
        with pytest.raises(UserError) as caught:
            template.example({"question": "q", "answer": "a"} | row, "row 4")
        assert said in str(caught.value)
    with pytest.raises(UserError, match=r"t\.yaml: field prompt: line 2 of the template:"):
        _template(prompt="a\n{{ x ")
    with pytest.raises(UserError, match=r"t\.yaml: field references: not a Jinja2 expression:"):
        _template(references="x +")


def test_turns_before_a_prompt_are_checked() -> None:
    template = _template(turns="before", prompt="{{ asked }}", answer="yes")
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    found = template.example({"asked": "so?", "before": said}, "row 1")
    assert (found.system, found.shots, found.prompt) == ("system", (("user", "assistant"),), "so?")
    assert template.example({"asked": "so?", "before": None}, "row 1").shots == ()
    for wrong in (said[1:2], said[2:], [*said[1:], *said[:1]]):
        with pytest.raises(UserError, match="row 1: expected turns of `user` and `assistant` in alternation"):
            template.example({"asked": "so?", "before": wrong}, "row 1")
    with pytest.raises(UserError, match="field turns: row 1: 'before'; the row has: asked"):
        template.example({"asked": "so?"}, "row 1")
    with pytest.raises(UserError, match="texts that are scored as a whole have none"):
        _template(turns="before", fitness="perplexity")
