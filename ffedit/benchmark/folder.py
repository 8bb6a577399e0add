"""The manifest of a results folder, which ties the folder to one run.

`manifest.json` records the model, the facts, the mode, all hyperparameters of the edits and the versions of the
libraries. A folder of another run is refused with an error that names what differs; only methods may be added. The
machines are recorded too, but a different machine is not refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffedit.benchmark.journal import merge
from ffedit.editor.provenance import versions
from ffedit.errors import EditError
from ffedit.files.atomic import write_text
from ffedit.files.resuming import LOCK, differences, leaves

MANIFEST, EDITS, REPORT, TABLES = "manifest.json", "edits", "report.json", "report.md"
WAYS_OUT = "name another folder, or replace these results with --force"
OWN = (MANIFEST, "results*.jsonl", REPORT, TABLES, EDITS)


def earlier(folder: Path, run: Mapping[str, Any], force: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the settings and the machines from the manifest of a claimed folder; both empty where it has no results.

    Args:
        folder: results folder.
        run: the settings known so far of the run that is to continue there, plain JSON.
        force: delete the results that are there.

    Raises:
        EditError: results of another run or version, a damaged manifest, or files other than results.
    """
    if force:
        _clear(folder)
    path = folder / MANIFEST
    if not path.exists():
        if (other := _other(folder)) is not None:
            raise EditError(f"{folder}: holds {other}, but no {MANIFEST} of `ffedit bench`; name a new folder")
        return {}, []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        there, made_by = dict(found["run"]), dict(found["versions"])
        machines = [dict(machine) for machine in found["hardware"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EditError(f"{path}: not a manifest of `ffedit bench`; {WAYS_OUT}") from error
    _refuse_difference(folder, "other versions", _released(made_by), _released(versions()))
    _refuse_difference(folder, "another run", there, run)
    merge(folder)
    return there, machines


def opened(
    folder: Path,
    there: Mapping[str, Any],
    run: Mapping[str, Any],
    machines: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> None:
    """Write the manifest of a run, at every start: methods or a machine may have been added.

    Args:
        folder: results folder, claimed.
        there: the settings that `earlier` returned.
        run: the settings that all results in the folder must share, plain JSON.
        machines: all machines of the run, as by `hardware`.
        about: further entries, plain JSON.

    Raises:
        EditError: the two runs differ, or the folder cannot be written.
    """
    _refuse_difference(folder, "another run", there, run)
    content = {"run": run, "versions": versions(), "hardware": list(machines), **about}
    write_text(folder / MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _refuse_difference(folder: Path, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise an `EditError` if a setting that is in both differs; methods may be added, and names are not compared."""
    old, new = leaves(there), leaves(here)
    both = [name for name in new if name in old and not name.endswith(".name")]
    if other := differences({name: old[name] for name in both}, {name: new[name] for name in both}):
        raise EditError(f"{folder}: results of {what} ({other}); {WAYS_OUT}")


def _clear(folder: Path) -> None:
    """Delete the results in a folder.

    Raises:
        EditError: the folder holds other files too; nothing is deleted then.
    """
    own = [path for name in OWN for path in folder.glob(name)]
    if (other := _other(folder, own)) is not None:
        raise EditError(f"{folder}: holds {other}, which is no result of `ffedit bench`; name a new folder")
    for path in own:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _other(folder: Path, own: Sequence[Path] = ()) -> str | None:
    """Return the name of the first entry of a claimed folder that is not in `own`, or None."""
    return next((path.name for path in sorted(folder.iterdir()) if path.name != LOCK and path not in own), None)


def _released(made_by: Mapping[str, str]) -> dict[str, str]:
    """Strip the local part of versions, which names the build's hardware: torch 2.9.1+cpu becomes 2.9.1."""
    return {name: str(version).partition("+")[0] for name, version in made_by.items()}
