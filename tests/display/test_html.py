"""Pages: whole without a network, and deaf to whatever a corpus, a tokenizer or a prompt holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from making import made
from pages import looks_right, needs_nothing_else, poisoned, said, shows_text_only
from shell import TEXT
from shown import shown

from ffedit import Corpus, inspect_edit, inspect_memory, inspect_prompt
from ffedit.display.html import page
from ffedit.display.terminal.memories import edited_view
from ffedit.inspector.views import View

pytestmark = pytest.mark.usefixtures("warm_cache")

PROMPT = "the Eiffel tower is located in"
# What stands in a view by its own right: names of memories, measures, cases.
OURS = {"slot", "address", "name", "memory", "case", "settings"}


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, View]:
    """One view of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text.txt").write_text(TEXT * 3)
    corpus, editable = Corpus(folder / "text.txt"), zoo.shared("gpt2")
    memory = inspect_memory(editable, "1.7", corpus=corpus, top=4)
    prompt = inspect_prompt(editable, PROMPT, scaled={"1.7": 0.0}, top=2)
    edit = inspect_edit(editable, made(editable, {1: 1}, size=0.3), corpus=corpus, top=3)
    return {"memory": memory, "prompt": prompt, "edit": edit}


@pytest.mark.parametrize("kind", ["memory", "prompt", "edit"])
def test_a_page_needs_nothing_else_and_shows_what_a_text_holds_as_text(kind: str, views: dict[str, View]) -> None:
    needs_nothing_else(page(views[kind]))
    shows_text_only(page(poisoned(views[kind], OURS)), page(views[kind]))


def test_a_page_says_what_its_view_says(views: dict[str, View]) -> None:
    memory, prompt = views["memory"], views["prompt"]
    text = said(page(views["memory"]))
    assert "Memory 1.7 of" in text
    for one in memory.triggers:  # type: ignore[attr-defined]
        assert f"{one.coefficient:.2f}" in text and one.next.token.strip() in text
    text = said(page(views["prompt"]))
    for layer in prompt.layers:  # type: ignore[attr-defined]
        assert all(f"{one.slot} {one.promotes.token.strip()}" in text for one in layer.firing)
    edit = views["edit"]
    fact = edit.facts[0]  # type: ignore[attr-defined]
    assert " → " in fact and f"ffedit inspect edit {fact} Edit " in said(page(edit))
    foreign = replace(edit, facts=())  # type: ignore[call-arg, type-var]
    assert "ffedit inspect edit A change of " in said(page(foreign))
    assert shown(edited_view(edit)).startswith(fact)  # type: ignore[arg-type]
    assert shown(edited_view(foreign)).startswith("Edit ")  # type: ignore[arg-type]


def test_pages_fit_a_phone_and_a_desktop_in_light_and_in_dark(tmp_path: Path, views: dict[str, View]) -> None:
    looks_right(tmp_path, [page(shown) for view in views.values() for shown in (view, poisoned(view, OURS))])
