"""Results in Python and in a notebook: short when printed, as HTML, and as figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from making import made

import ffedit
from ffedit.display.notebook import VIEWS

ROOT = Path(__file__).parents[2]
HOSTILE = ffedit.Fact("<b>Tower</b>", "{} & co is located in", "Rome", "Paris", paraphrases=["{} is in"] * 3)


@pytest.fixture(scope="module")
def editable() -> ffedit.Editable:
    return ffedit.load("atlas")


@pytest.fixture(scope="module")
def fact() -> ffedit.Fact:
    return ffedit.read_facts(ROOT / "edits" / "eiffel-tower.json")[0]


@pytest.fixture(scope="module")
def results(editable: ffedit.Editable, fact: ffedit.Fact) -> dict[str, Any]:
    edit = made(editable, {1: 1}, fact)
    traces = ffedit.locate_all(editable, [fact], samples=2)
    return {
        "editable": editable,
        "fact": fact,
        "trace": traces.traces[0],
        "traces": traces,
        "averages": traces.aggregate(),
        "edit": edit,
        "report": ffedit.evaluate(editable, fact, edit),
        "explanation": ffedit.explain(editable, fact, edit),
        "prompt": ffedit.inspect_prompt(editable, fact.text),
        "memory": ffedit.inspect_memory(editable, "1.17", corpus=ffedit.Corpus(tokens=512)),
        "diff": ffedit.diff("atlas", "atlas"),
        "matrix": editable.memories[1],
        "memories": editable.memories,
        "update": edit.updates[ffedit.Address(1)],
    }


def test_a_printed_result_is_a_few_lines_that_say_what_it_is(results: dict[str, Any]) -> None:
    for name, result in results.items():
        lines = repr(result).splitlines()
        assert len(lines) <= 11 and max(map(len, lines)) <= 300, name
        assert lines[0].startswith(type(result).__name__), name
    assert "3 layers of 2,560 memories" in repr(results["editable"]) and "'Paris'" in repr(results["trace"])
    assert results["edit"].fingerprint() in repr(results["edit"]) and "→ Rome" in repr(results["edit"])
    assert "efficacy" in repr(results["report"]) and "rank 1" in repr(results["update"])
    assert "'Eiffel Tower', '{} is located in the city of', target='Rome', previous='Paris'" in repr(results["fact"])


def test_many_facts_are_printed_as_their_number(editable: ffedit.Editable) -> None:
    facts = tuple(ffedit.Fact(f"Tower {i}", "{} is in", "Rome") for i in range(5))
    assert repr(replace(made(editable, {1: 1}), facts=facts)).endswith("… and 2 more")


def test_every_result_that_is_displayed_has_a_view(results: dict[str, Any]) -> None:
    for name, result in results.items():
        if isinstance(result, tuple(VIEWS)):
            html = result._repr_html_()
            assert html.startswith("<pre") and html.endswith("</pre>") and len(html) < 20_000, name
            # Text has the page's own colour and background, on a dark page as on a light one.
            assert not re.search(r"(color|background)[^;\"]*#(000000|ffffff)", html), name


def test_text_of_facts_is_escaped() -> None:
    html = HOSTILE._repr_html_()
    assert "&lt;b&gt;Tower&lt;/b&gt;" in html and "{} &amp; co" in html and "<b>" not in html
    assert re.search(r"paraphrases +</span>3", html)


def test_a_trace_is_drawn_as_a_figure_that_shows_itself(results: dict[str, Any], tmp_path: Path) -> None:
    figure = results["trace"].plot(layer=2)
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").read_text().startswith("<?xml")
    assert results["traces"].plot()._repr_png_().startswith(b"\x89PNG")
    lines = results["averages"].plot(results["averages"])
    assert len(lines.axes) == 2 and lines._repr_png_().startswith(b"\x89PNG")


def test_an_edit_that_is_applied_gives_the_edited_model(editable: ffedit.Editable, results: dict[str, Any]) -> None:
    with results["edit"].applied(editable) as edited:
        assert edited is editable and results["edit"].fingerprint() in repr(edited)
    assert "edits applied: none" in repr(editable)
