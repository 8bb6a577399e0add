"""Plain English: no phrase that readers had to read twice, and a subject in every text of `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from ffedit.cli import cli

ROOT = Path(__file__).parents[1]
# Pages and packages that have been read for this list.
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "evaluations/README.md", "evaluations/reliability/README.md")
    ),
    *sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")),
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "results.md", ROOT / "docs" / "sites.md"}),
]
READ = (
    "cli",
    "display",
    "evaluator",
    "safety",
    "exporter",
    "inspector",
    "locator",
    "benchmark",
    "layer_choice",
    "api.py",
)
SOURCES = [path for name in READ for path in sorted((ROOT / "ffedit" / name).rglob("*.py") or [ROOT / "ffedit" / name])]
BANNED = (
    *(
        "told apart",
        "are told",
        "is told",
        "chose no default",
        "chose nothing",
        "for want of",
        "that ship",
        "what ships",
    ),
    *("be had", "at hand", "is dear", "in what was", "what was given", "what is given", "of what is"),
    *("go on where", "goes on where", "gone on with", "whose embeddings", "hold corrupted", "something is restored"),
)
# A text of `--help` that begins so has no noun.
NOUNLESS = re.compile(r"(Of|Which|Whose|Where|What|Or|Then|Only so|Also what|How much|So)\b")


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it, with their names."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from commands(found, f"{name} {below}")


def test_banned_phrases_stand_nowhere() -> None:
    found = {}
    for path in (*PAGES, *SOURCES):
        text = " ".join(path.read_text(encoding="utf-8").lower().split())
        if phrases := [phrase for phrase in BANNED if re.search(rf"\b{phrase}\b", text)]:
            found[path] = phrases
    assert len(SOURCES) > 80 and not found


def test_the_texts_of_help_have_a_subject() -> None:
    options = [
        (f"{name} {option.opts[0]}", option.help or "")
        for name, command in commands(cli, "ffedit")
        for option in command.params
        if isinstance(option, click.Option)
    ]
    assert len(options) > 100 and not [option for option in options if NOUNLESS.match(option[1])]
