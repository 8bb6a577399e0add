"""Journeys through `ffedit inspect memory`, `prompt` and `edit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import made
from shell import TEXT, Ran, shell

import ffedit

PROMPT = "the Eiffel tower is located in"
Command = Callable[..., Ran]


@pytest.fixture
def inspect(empty: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    (empty / "text.txt").write_text(TEXT)
    return lambda *words: shell(capsys, "inspect", *words, "--model", model)


def found(done: Ran) -> Any:
    assert (done.code, done.err) == (0, ""), done.err
    return json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_inspect_memory_shows_value_and_triggers(inspect: Command) -> None:
    view = found(inspect("memory", "1.7", "--corpus", "text.txt", "--top", "3", "--json", "-"))
    assert (view["slot"], view["corpus"], len(view["value"]["top"])) == ("1.7", "text.txt", 3)
    assert {"coefficient", "prefix", "next", "rank"} == set(view["triggers"][0])
    done = inspect("memory", "1.7", "--corpus", "text.txt", "--html", "page.html")
    assert done.code == 0 and "Memory 1.7" in done.out and "Its key" in done.out
    assert "ffedit inspect memory" in Path("page.html").read_text(encoding="utf-8")


def test_a_prompt_with_turned_memories(inspect: Command) -> None:
    view = found(inspect("prompt", PROMPT, "--set", "1.7=0", "--set", "2.5=3", "--json", "-"))
    assert view["turned"] == {"1.7": 0, "2.5": 3} and view["untouched"]["top"][0]["token"].strip() == "Paris"
    assert len(view["layers"]) == 3
    done = inspect("prompt", PROMPT, "--set", "1.7=0")
    assert done.code == 0 and "1.7 × 0" in done.out


def test_an_edit_and_a_prompt_before_and_after_it(inspect: Command, model: Path) -> None:
    editable = ffedit.load(model)
    made(editable, {1: 1}, size=0.3).save("edit")
    view = found(inspect("edit", "edit", "--corpus", "text.txt", "--json", "-"))
    assert [layer["address"] for layer in view["layers"]] == ["1"] and len(view["prompts"]) == 1
    done = inspect("edit", "edit", "--corpus", "text.txt", "--html", "page.html")
    assert done.code == 0 and "memory that layer 1 gets" in done.out
    assert "ffedit inspect edit" in Path("page.html").read_text(encoding="utf-8")
    both = found(inspect("prompt", PROMPT, "--edit", "edit", "--json", "-"))
    assert both["before"]["prediction"] == found(inspect("prompt", PROMPT, "--json", "-"))["prediction"]
    assert both["prediction"] != both["before"]["prediction"]
    assert "and after it" in inspect("prompt", PROMPT, "--edit", "edit", "--html", "both.html").out
    text = Path("both.html").read_text(encoding="utf-8")
    assert "ffedit inspect prompt" in text and "Before the edit" in text


def test_quiet_says_nothing_and_json_goes_to_a_file(inspect: Command) -> None:
    done = inspect("prompt", PROMPT, "--quiet", "--json", "view.json")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert json.loads(Path("view.json").read_text())["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["memory", "9.1"], "layers 0 to 2"),
        (["memory", "1.7", "--corpus", "binary.txt"], "NUL"),
        (["prompt", PROMPT, "--set", "1.7"], "L.I=FACTOR"),
        (["edit", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_one_line(inspect: Command, words: list[str], says: str) -> None:
    Path("binary.txt").write_bytes(b"a\0b")
    done = inspect(*words)
    assert done.code == 1 and done.out.count("\n") <= 2 and says in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
