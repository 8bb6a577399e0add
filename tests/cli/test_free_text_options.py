"""Every option of every command whose value is free text or a path, with one that it cannot have: one line, no file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from making import check_here, made
from shell import invoke
from test_every_option import COMMANDS, WRONG

import ffedit

FACTS = '[{"subject": "Eiffel Tower", "prompt": "{} is located in the city of", "target": "Rome"}]'
# What each command is given beside the option; FACTS, EDIT and MODEL are a file of facts, an edit and a checkpoint.
WORDS = {
    "apply": ["FACTS", "--layer", "0"],
    "run": ["FACTS"],
    "locate": ["FACTS"],
    "inspect memory": ["1.3"],
    "inspect prompt": ["The Eiffel Tower is in"],
    "inspect edit": ["EDIT"],
    "evaluate": ["FACTS"],
    "bench": ["FACTS"],
    "ask": ["The Eiffel Tower is in"],
    "export": ["EDIT"],
    "undo": ["MODEL"],
    "show": ["EDIT"],
    "diff": ["MODEL", "MODEL"],
}
INSIDE = "FACTS/inside.html"  # of a file
WRONG_TEXT = {
    "--corpus": "no/such/text.txt",
    "--device": "no-such-device",
    "--device-map": "no-such-map",
    "--edit": "no-such-edit",
    "--edited": "no-such-checkpoint",
    "--export": INSIDE,
    "--fact-token": "Big",
    "--html": INSIDE,
    "--include-path": "no-such-folder",
    "--json": INSIDE,
    "--language": "no-such-language",
    "--layers": "no-layer",
    "--log": INSIDE,
    "--map": "target=nowhere",
    "--max-memory": "much",
    "--methods": "no-such-method",
    "--mode": "no-such-mode",
    "--model": "no-such-model",
    "--offload": INSIDE,
    "--out": INSIDE,
    "--plot": "picture.exe",
    "--previous": "London",
    "--prompt": "no subject",
    "--preset": "no-such-preset",
    "--protect": "no/such/names.txt",
    "--require": "no-such-metric>=2",
    "--revision": "no-such-revision",
    "--save-recipe": INSIDE,
    "--set": "no.such=number",
    "--stats": "no-such-folder",
    "--subject": "Rome",
    "--tasks": "",
    "--target": "Paris",
    "--text": "no-such-text.txt",
    "--value-matrix": "no.such.matrix",
    "--where": "nowhere",
}
CASES = [
    (" ".join(words), option.opts[0])
    for words, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag and type(option.type) not in WRONG
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A file of facts, an edit of the embedded model, and the checkpoint that comes of it."""
    folder = tmp_path_factory.mktemp("free-text")
    names = {"FACTS": folder / "facts.json", "EDIT": folder / "edit", "MODEL": folder / "model"}
    names["FACTS"].write_text(FACTS)
    editable = ffedit.load("atlas")
    edit = made(editable, {0: 1}, ffedit.read_facts(names["FACTS"])[0])
    edit.save(names["EDIT"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ffedit.exporter.exporting.check_fresh", check_here)
        ffedit.export(editable, edit, names["MODEL"])
    yield {name: str(path) for name, path in names.items()}


@pytest.mark.parametrize(("command", "option"), CASES)
def test_a_wrong_text_is_one_line(
    files: dict[str, str],
    command: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*command.split(), *WORDS.get(command, []), option, WRONG_TEXT[option]]
    code = invoke(
        [
            word.replace(name, path) if (name := word.split("/")[0]) in files and (path := files[name]) else word
            for word in words
        ]
    )
    error = capsys.readouterr().err
    assert code in (1, 2), error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
