"""The gate builds an environment of its own, and leaves a developer's as it was."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

GATE = Path(__file__).parents[2] / ".ci" / "run"
README = """
<!-- newcomer: test -->
```bash
mkdir .venv && mkdir .venv/bin
for tool in ruff mypy lint-imports mkdocs python; do ln -s "$(type -P true)" .venv/bin/$tool; done
{last}
```
"""


def gate(folder: Path, last: str) -> subprocess.CompletedProcess[str]:
    """Run the gate in a repository whose README says this last, and whose tools find nothing."""
    (folder / ".ci").mkdir(exist_ok=True)
    shutil.copy(GATE, folder / ".ci")
    (folder / "README.md").write_text(README.format(last=last))
    return subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("last", "code"), [("true", 0), ("exit 3", 3), ("kill -TERM $PPID", -15)])
def test_an_environment_that_was_there_is_there_afterwards(tmp_path: Path, last: str, code: int) -> None:
    """However the gate ends: in order, by a test that fails, or because it is stopped."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "own").touch()
    done = gate(tmp_path, last)
    assert done.returncode == code, done.stderr
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["own"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ci", ".venv", "README.md"]


@pytest.mark.parametrize("tool", ["ruff", "lint-imports", "mypy", "mkdocs", "python"])
def test_what_a_tool_finds_is_shown_and_fails_the_gate(tmp_path: Path, tool: str) -> None:
    """Whichever it is, and whatever the others find beside it."""
    found = f"rm .venv/bin/{tool}; printf '#!/bin/sh\\necho what it found\\nexit 5\\n' > .venv/bin/{tool}"
    done = gate(tmp_path, f"{found}; chmod +x .venv/bin/{tool}")
    assert (done.returncode, done.stdout) == (5, "what it found\n"), done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_gate_leaves_no_environment_behind(tmp_path: Path) -> None:
    assert gate(tmp_path, "true").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ci", "README.md"]


def test_an_environment_that_a_killed_gate_put_aside_is_never_overwritten(tmp_path: Path) -> None:
    for name in (".venv", ".venv-aside"):
        (tmp_path / name).mkdir()
    done = gate(tmp_path, "true")
    assert done.returncode == 1 and "left by a gate that was killed" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ci", ".venv", ".venv-aside", "README.md"]
