"""Plain English: no phrase that readers had to read twice, and a subject in every text of `--help`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from ffedit.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "evaluations/README.md", "evaluations/reliability/README.md")
    ),
    *sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = sorted((ROOT / "ffedit").rglob("*.py"))
# Names of variables and parameters that say nothing of what they hold.
NAMES = {"found", "one", "some", "place", "given", "told", "held"}
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
# Constructions that had to be read twice, as patterns, with the page or message that had them.
IN_PAGES = (
    r"go(es)? on (with|where)",  # the same command goes on where saved work allows
    r"moves? along",  # what was tried moved along the same trade
    r"in the place of",
    r"(is|are) to (be|stay|become)",  # the object that is to stay
    r"(in|of) (whose|whom)",  # reporting facts of whose subjects other facts are known
    r"what (it|they) (gives?|gave|did)",  # kept keys give what they gave
    r"stands? (there )?already",
    r"bears? (that|this) out",
    r"told (that|of|apart)",  # told that Argentina lies in North America
    r"from now on made|made from now on",
    r"the same of the",
    r"for (those )?who (want|need)s?",
    r"(was|were|is) found (on|of|with)",
)
# Also not in messages: strings of the package that are not docstrings.
IN_MESSAGES = (
    *IN_PAGES,
    r"(?<!there )is no(?! longer)",  # 'foo' is no memory
    r"comes? to (no|one|\{\})",  # the prompt comes to no token
    r"not known; there is",
    r"say(, was expected|$)",  # 500MB or 20GB, say, was expected
    r"(is|are) one$",
    r"so that nothing",
    r"one token is",
    r"which no (adapter|edit|file)",  # which no adapter of low rank holds
    r"stands in no",
    r"names the file in its place",
    r"turn(s|ed)? (no )?memor(y|ies)",
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


def messages(path: Path) -> Iterator[str]:
    """The strings of a module that are not docstrings, `{}` in place of what is formatted, on one line each."""
    tree, seen = ast.parse(path.read_text(encoding="utf-8")), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            seen |= {id(first.value)} if isinstance(first, ast.Expr) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in seen:
            seen |= {id(inner) for inner in ast.walk(node)}
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield " ".join("".join(parts).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield " ".join(node.value.split())


def matched(patterns: tuple[str, ...], text: str) -> list[str]:
    """The patterns that a text contains as words."""
    return [found[0] for pattern in patterns if (found := re.search(rf"(?<!\w)({pattern})(?!\w)", text))]


def test_constructions_that_had_to_be_read_twice_stand_nowhere() -> None:
    texts = [(path, " ".join(path.read_text(encoding="utf-8").split())) for path in PAGES]
    found = [(path.name, phrases) for path, text in texts if (phrases := matched(IN_PAGES, text))]
    found += [
        (f"{path.relative_to(ROOT)}: {message[:80]}", phrases)
        for path in SOURCES
        for message in messages(path)
        if (phrases := matched(IN_MESSAGES, message))
    ]
    assert len(SOURCES) > 200 and not found


def test_the_entries_of_docstrings_have_a_noun() -> None:
    entry = re.compile(r"^ +\w+: (?:of|that|which|what|whose|who) .*", re.MULTILINE)
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert not {path.name: lines for path, text in texts.items() if (lines := entry.findall(text))}


def test_the_patterns_find_what_they_are_for() -> None:
    for text in ("'x' is no size", "go on where", "9, say, was expected", "the prompt comes to no token"):
        assert matched(IN_MESSAGES, text)
    assert not matched(IN_MESSAGES, "there is no score; a size such as 9 was expected")


def test_banned_phrases_stand_nowhere() -> None:
    found = {}
    for path in (*PAGES, *SOURCES):
        text = " ".join(path.read_text(encoding="utf-8").lower().split())
        if phrases := [phrase for phrase in BANNED if re.search(rf"\b{phrase}\b", text)]:
            found[path] = phrases
    assert not found


def test_names_say_what_they_hold() -> None:
    names = [
        (path.name, node.lineno, name)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else "",)
        if name in NAMES
    ]
    assert not names


def test_the_texts_of_help_have_a_subject() -> None:
    options = [
        (f"{name} {option.opts[0]}", option.help or "")
        for name, command in commands(cli, "ffedit")
        for option in command.params
        if isinstance(option, click.Option)
    ]
    assert len(options) > 100 and not [option for option in options if NOUNLESS.match(option[1])]
