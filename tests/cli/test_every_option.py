"""Every option of every command, with a value that it cannot have, is one line and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from making import check_here, made
from shell import invoke, process

import ffedit
from ffedit.cli import cli

# A wrong value by the type of an option.
WRONG = {click.IntRange: "-1", click.FloatRange: "-1", click.types.IntParamType: "x", click.Choice: "no-such-choice"}


def leaves(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that call it."""
    if not isinstance(group, click.Group):
        yield words, group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from leaves(command, (*words, name))


COMMANDS = dict(leaves(cli))
WRONG_WORDS = [
    (*words, option.opts[0], *[WRONG[type(option.type)]] * option.nargs)
    for words, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and type(option.type) in WRONG
]
UNKNOWN = [(*words, "--no-such-option") for words in COMMANDS]
# Options that take a value, without one.
BARE = [
    (*words, option.opts[0])
    for words, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag
]
CODE = """
import ast, contextlib, io, sys
from ffedit.cli import invoke
for words in ast.literal_eval(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = invoke(list(words))
    line = said.getvalue()
    if code not in (1, 2) or not line.startswith("error: ") or line.count("\\n") != 1:
        print(words, code, line)
print("imported:", *(name for name in ("torch", "transformers") if name in sys.modules))
"""


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("cases", [WRONG_WORDS, UNKNOWN, BARE], ids=["wrong value", "unknown option", "no value"])
def test_a_wrong_option_is_one_line_without_torch(cases: list[tuple[str, ...]]) -> None:
    assert len(cases) >= len(COMMANDS) >= 20
    done = process("-c", CODE, repr(cases))
    assert (done.code, done.out, done.err) == (0, "imported:\n", "")


# Free text and paths: one line, and no file --------------------------------------------------------------

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
    "bench": ["FACTS", "--out", "new"],
    "ask": ["The Eiffel Tower is in"],
    "export": ["EDIT", "--out", "new"],
    "undo": ["MODEL", "--out", "new"],
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
    assert error.startswith("error: ") and error.count("\n") == 1 and "Missing" not in error
    assert not list(tmp_path.iterdir())
