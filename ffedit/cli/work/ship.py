"""Commands on checkpoints: export an edit, undo one, compare two checkpoints."""

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


def export(edit_from: Path, out: Path, model: str | None, surface: Surface, **kwargs: Any) -> None:
    """Write the edit of a folder into its base; `kwargs` are options of `ffedit.export`."""
    edit = ffedit.Edit.load(edit_from)
    with base_of(edit, model) as base:
        exported = ffedit.export(base, edit, out, **kwargs)
    can_ask = edit.facts and kwargs["format"] != "adapter"
    ask = next_commands(join(["ffedit", "ask", edit.facts[0].text, "--model", str(out)])) if can_ask else None
    surface.show(shipped(exported), ask)
    surface.write_json(written(exported))


def undo(checkpoint: str, out: Path, surface: Surface, **kwargs: Any) -> None:
    """Take an edit out of a checkpoint; `kwargs` are options of `ffedit.undo`."""
    exported = ffedit.undo(checkpoint, out, **kwargs)
    surface.show(shipped(exported, undone=True))
    surface.write_json(written(exported))


def diff(base: str, edited: str, surface: Surface) -> None:
    """Compare two checkpoints."""
    with surface.progress() as progress:
        difference = ffedit.diff(base, edited, progress=progress)
    surface.show(diff_view(difference))
    surface.write_json(difference.to_dict())
