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


def export(edit_from: Path, out: Path, model: str | None, no_originals: bool, surface: Surface, **how: Any) -> None:
    """Write the edit of a folder into its base; `how` are options of `ffedit.export`."""
    edit = ffedit.Edit.load(edit_from)
    with base_of(edit, model) as base:
        done = ffedit.export(base, edit, out, originals=not no_originals, **how)
    can_ask = edit.facts and how["format"] not in ("adapter", "delta")
    ask = next_commands(join(["ffedit", "ask", edit.facts[0].text, "--model", str(out)])) if can_ask else None
    surface.show(shipped(done), ask)
    surface.write_json(written(done))


def undo(checkpoint: str, out: Path, surface: Surface, **how: Any) -> None:
    """Take an edit out of a checkpoint; `how` are options of `ffedit.undo`."""
    done = ffedit.undo(checkpoint, out, **how)
    surface.show(shipped(done, undone=True))
    surface.write_json(written(done))


def diff(base: str, edited: str, rank: int | None, out: Path | None, force: bool, surface: Surface) -> None:
    """Compare two checkpoints, and save what differs as an edit of the first, in the folder `out`."""
    with surface.progress() as progress:
        difference = ffedit.diff(base, edited, rank=rank, progress=progress)
    surface.show(diff_view(difference))
    if out is not None:
        edit = ffedit.edit_from_diff(ffedit.load(base), difference)
        edit.save(out, force=force)
        surface.show(f"Saved an edit of rank {edit.rank} in {out}.")
    surface.write_json(difference.to_dict())
