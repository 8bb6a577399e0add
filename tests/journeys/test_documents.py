"""Commands of the README and the documentation are known, with valid options, and name files that are there."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest
import rich_click as click
from shell import shell

from ffedit.cli import cli
from ffedit.errors import FFEditError

ROOT = Path(__file__).parents[2]
# The packages of these pages are installed and their commands run in `test_added_packages`.
ADDED = ("add-a-method.md", "add-a-metric.md")
PAGES = [
    *(path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.name not in ADDED),
    *sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")),  # whose cells `test_tutorials` runs
]
# A block of commands that take minutes, or what a test has not, is marked as `<!-- parsed only: REASON -->`.
BLOCK = re.compile(r"(?:<!-- parsed only: ([^>]+) -->\n)?```bash\n(.*?)```", re.DOTALL)


def text_of(page: Path) -> str:
    """Return the text of a page, or that of a notebook's cells."""
    text = page.read_text(encoding="utf-8")
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"]) if page.suffix == ".ipynb" else text


def commands(page: Path, to_run: bool = False) -> list[list[str]]:
    """The words of each command of ffedit in a page, without the redirected input; or only of those to run."""
    lines = []
    for reason, block in BLOCK.findall(text_of(page)):
        if not (to_run and reason):
            lines += [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    ours = [words[1 : words.index("<") if "<" in words else None] for words in lines if words[:1] == ["ffedit"]]
    return [words for words in ours if not (to_run and "smollm2" in words)]  # `test_smollm2` runs what that model does


def parse(words: list[str]) -> None:
    """Refuse unknown commands, options and choices; files that an earlier command would have made may be missing."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    try:
        command.make_context("ffedit", words)
    except FFEditError as error:
        assert "--" not in str(error), error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_valid_options_and_name_real_files(page: Path) -> None:
    for words in commands(page):
        parse(words)
        for word in words:
            assert not re.fullmatch(r"[A-Z]+|\S*\w\|\w\S*", word) or word == "DIR", words
            assert not word.startswith(("edits/", "evaluations/")) or (ROOT / word).exists(), word


@pytest.mark.usefixtures("warm_cache", "verified_here")
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "guide.md"], ids=lambda page: page.name)
def test_commands_run_as_pasted(
    page: Path, capsys: pytest.CaptureFixture[str], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "edits").symlink_to(ROOT / "edits")
    for words in commands(page, to_run=True):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        ran = shell(capsys, *words)
        assert ran.code == 0, (words, ran.err)
