"""Commands on checkpoints: an edit exported, one undone, two compared."""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Any

import ffedit
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import base_of
from ffedit.cli.work.result import written
from ffedit.display.terminal.console import next_commands
from ffedit.display.terminal.diff import diff_view
from ffedit.display.terminal.shipped import shipped


def export(edit_from: Path, out: Path, model: str | None, surface: Surface, **how: Any) -> None:
    """Write the edit of a folder into its base; `how` are options of `ffedit.export`."""
    edit = ffedit.Edit.load(edit_from)
    with base_of(edit, model) as base:
        done = ffedit.export(base, edit, out, **how)
    can_ask = edit.facts and how["format"] != "adapter"
    ask = next_commands(join(["ffedit", "ask", edit.facts[0].text, "--model", str(out)])) if can_ask else None
    surface.show(shipped(done), ask)
    surface.write_json(written(done))


def undo(checkpoint: str, out: Path, surface: Surface, **how: Any) -> None:
    """Take an edit out of a checkpoint; `how` are options of `ffedit.undo`."""
    done = ffedit.undo(checkpoint, out, **how)
    surface.show(shipped(done, undone=True))
    surface.write_json(written(done))


def diff(base: str, edited: str, surface: Surface) -> None:
    """Compare two checkpoints."""
    with surface.progress() as progress:
        difference = ffedit.diff(base, edited, progress=progress)
    surface.show(diff_view(difference))
    surface.write_json(difference.to_dict())
