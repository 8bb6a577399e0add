"""Folder of a benchmark's results: the manifest that ties it to one run, and the journal that a run resumes from.

`manifest.json` records the model, the facts, the mode, all hyperparameters of the edits and the versions of the
libraries. A folder of another run is refused with an error that names what differs; only methods may be added. The
machines are recorded too, but a different machine is not refused.

`results.jsonl` has one JSON line per method, fact and moment. Lines come in groups: the scores of all facts that one
edit of one method was measured on, and last a line about the model itself, which closes the group. A group without its
last line is measured again as a whole, so that a run that was interrupted gives the same figures as one that was not.
Where several processes each measure their own facts, each appends to its own file (`results-3.jsonl`); the files are
merged in a fixed order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffedit.editor.provenance import versions
from ffedit.errors import EditError
from ffedit.evaluator.metrics import SCORE_PARTS
from ffedit.facts.form import EVERY, INTEGER, NUMBER, OBJECT, TEXT, YES_OR_NO, Form, Maybe, check_form
from ffedit.files import resuming
from ffedit.files.atomic import finite, write_text
from ffedit.files.placing import LOCK, sweep
from ffedit.files.resuming import differences, leaves
from ffedit.files.seal import sealed, unsealed

MANIFEST, EDITS, REPORT, TABLES = "manifest.json", "edits", "report.json", "report.md"
RESULTS = "results.jsonl"
OWN = (MANIFEST, "results*.jsonl", REPORT, TABLES, EDITS)
WAYS_OUT = "name another folder, or replace these results with --force"
# `Line.method` of the unedited model; `Line.fact` of the line about the whole model, which closes a group.
UNEDITED, WHOLE = "", -1
# Fields that are read from a line: the measurements of its fact or model, or the `error` that prevented them.
LINE: Form = {
    **{"method!": Maybe(TEXT), "when!": TEXT, "chunk!": INTEGER, "fact!": Maybe(INTEGER), "finite": YES_OR_NO},
    **{"scores": {EVERY: Maybe(NUMBER)}, "says": TEXT, "kinds": {EVERY: NUMBER}, "left_out": {EVERY: INTEGER}},
    **{"error": TEXT, "problems": {EVERY: TEXT}, "drift": Maybe(NUMBER)},
    **{"perplexity": Maybe(NUMBER), "norm_ratio": Maybe(NUMBER), "seconds": {"choosing!": NUMBER, "solving!": NUMBER}},
}
OF_FACT: Form = {"scores!": OBJECT, "says!": TEXT}
OF_MODEL: Form = {"norm_ratio!": Maybe(NUMBER)}
OF_EDIT: Form = {**OF_MODEL, "seconds!": OBJECT}
VERSIONS: Form = {"versions!": {EVERY: TEXT}}
RUN: Form = {"run!": {"config": {EVERY: OBJECT}, "layers": [INTEGER]}, "hardware!": [TEXT]}


@dataclass(frozen=True)
class Line:
    """Measurements of one fact, or of the whole model, at one moment."""

    method: str  # the method that edited the model; `UNEDITED` before any edit
    when: str  # "before", "after" the fact's own edit, "end", or "at 20": when 20 facts were edited
    chunk: int  # index of the edit; in a sequence, of the last one so far
    fact: int  # index of the fact; `WHOLE` for the model
    measured: Mapping[str, Any]  # the measurements, plain JSON

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Return the identity of the line: of two lines with one key, one is kept."""
        return self.method, self.when, self.chunk, self.fact

    def to_dict(self) -> dict[str, Any]:
        """Return the line as plain JSON; numbers that are not finite become null, and `finite` is false then."""
        measured = finite(self.measured)
        fact = None if self.fact == WHOLE else self.fact
        line = {"method": self.method or None, "when": self.when, "chunk": self.chunk, "fact": fact, **measured}
        return line if measured == self.measured else {**line, "finite": False}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Line:
        """Return the line that `to_dict` was called on; ValueError for anything else."""
        check_form(line, LINE, "the line")
        if "error" not in line:
            of_model = {"before": {"problems!": OBJECT}, "after": OF_EDIT}.get(line["when"], OF_MODEL)
            check_form(line, of_model if line["fact"] is None else OF_FACT, "the line")
        if any(not 0 <= (line.get("scores", {}).get(name) or 0) <= 1 for name in SCORE_PARTS):
            raise ValueError(f"not all of the line's {', '.join(SCORE_PARTS)} are from 0 to 1")
        measured = dict(line)
        method, when, chunk, fact = (measured.pop(name) for name in ("method", "when", "chunk", "fact"))
        return cls(method or UNEDITED, when, chunk, WHOLE if fact is None else fact, measured)


class Journal:
    """Lines of a results folder.

    `process` is the rank of this process, if each writes its own file; None for `results.jsonl`. A process that does
    not write (`writes`) only holds added lines in memory.

    Raises:
        EditError: a line that is not the last one is damaged.
    """

    def __init__(self, folder: Path, process: int | None = None, writes: bool = True) -> None:
        own_file = folder / (RESULTS if process is None else f"results-{process}.jsonl")
        self.lines = {line.key: line for path in _files(folder) for line in _read(path)}
        self._file = resuming.Journal(own_file) if writes else None

    def done(self, method: str, when: str, chunk: int) -> bool:
        """Check whether a group is complete."""
        return (method, when, chunk, WHOLE) in self.lines

    def failed(self, method: str, chunk: int) -> bool:
        """Check whether the journal records that an edit could not be made."""
        line = self.lines.get((method, "after", chunk, WHOLE))
        return line is not None and "error" in line.measured

    def add(self, lines: Iterable[Line]) -> None:
        """Add the lines that are not in the journal yet. Raises OSError where they cannot be written."""
        new = {line.key: line.to_dict() for line in lines if line.key not in self.lines}
        if self._file is not None:
            with needed():
                self._file.add(*new.values())
        # Parsed back from the text, so that a run that continues reports the same.
        self.lines |= {key: Line.from_dict(json.loads(json.dumps(line))) for key, line in new.items()}


def merge(folder: Path) -> None:
    """Append the lines of the processes' files to `results.jsonl`, sorted by their keys, and delete those files."""
    shares = [path for path in _files(folder) if path.name != RESULTS]
    if not shares:
        return
    lines = {line.key: line for line in _read(folder / RESULTS)}
    new = [line for path in shares for line in _read(path) if line.key not in lines]
    lines |= {line.key: line for line in sorted(new, key=lambda line: (line.chunk, line.method, line.when, line.fact))}
    write_text(folder / RESULTS, resuming.json_lines(line.to_dict() for line in lines.values()))
    for path in shares:
        path.unlink()


def _files(folder: Path) -> list[Path]:
    """List the files of lines that exist, `results.jsonl` first."""
    shares = sorted(folder.glob("results-*.jsonl"), key=lambda path: (len(path.name), path.name))
    return [path for path in (folder / RESULTS, *shares) if path.exists()]


def _read(path: Path) -> list[Line]:
    lines = []
    for number, line in enumerate(resuming.read_journal(path), 1):
        try:
            lines.append(Line.from_dict(line))
        except ValueError as error:
            raise EditError(f"{path}, line {number}: not a result of `ffedit bench` ({error}); {WAYS_OUT}") from error
    return lines


@contextmanager
def needed() -> Iterator[None]:
    """Turn an `EditError` inside the block into an `OSError`: a full disk ends the run and is not a failed edit."""
    try:
        yield
    except EditError as error:
        raise OSError(str(error)) from error


def earlier(folder: Path, run: Mapping[str, Any], force: bool) -> tuple[dict[str, Any], list[str]]:
    """Read the settings and the machines from the manifest of a claimed folder; both empty where it has no results.

    `run` holds the settings of the new run, as far as known. With `force` it continues nothing: the results are to be
    deleted (`delete_results`).

    Raises:
        EditError: results of another run or version, a damaged manifest, or files other than results.
    """
    path = folder / MANIFEST
    for inside, _, _ in os.walk(folder / EDITS):
        sweep(Path(inside))
    if force:
        if (other := _other(folder, _results(folder))) is not None:
            raise EditError(f"{folder}: holds {other}, which is not a result of `ffedit bench`; name a new folder")
        return {}, []
    if not path.exists():
        if (other := _other(folder)) is not None:
            raise EditError(f"{folder}: holds {other}, but no {MANIFEST} of `ffedit bench`; name a new folder")
        return {}, []
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        check_form(manifest, VERSIONS)
        _refuse_difference(folder, "other versions", _released(manifest["versions"]), _released(versions()))
        check_form(manifest, RUN)  # the form of this version
        there, machines = dict(manifest["run"]), list(manifest["hardware"])
    except (OSError, ValueError, RecursionError) as error:
        ways = "name a new folder" if _other(folder, _results(folder)) else WAYS_OUT
        raise EditError(f"{path}: not a manifest of `ffedit bench`; {ways}") from error
    _refuse_difference(folder, "another run", there, run)
    try:
        there = unsealed(there)
    except ValueError as error:
        raise EditError(f"{path}: damaged ({error}); {WAYS_OUT}") from error
    merge(folder)
    return there, machines


def delete_results(folder: Path) -> None:
    """Delete the results in a claimed folder."""
    for entry in _results(folder):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _results(folder: Path) -> list[Path]:
    return [path for name in OWN for path in folder.glob(name)]


def write_manifest(
    folder: Path,
    there: Mapping[str, Any],
    run: Mapping[str, Any],
    machines: Sequence[str],
    unusable: Sequence[Mapping[str, Any]],
) -> None:
    """Write the manifest of `run` into a claimed folder, at every start: methods or a machine may have been added.

    Raises EditError where the run differs from the settings `there` that `earlier` returned, or it cannot be written.
    """
    _refuse_difference(folder, "another run", there, run)
    content = {
        "run": sealed(run),
        "versions": versions(),
        "hardware": list(machines),
        "unusable": list(map(dict, unusable)),
    }
    write_text(folder / MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _refuse_difference(folder: Path, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise an `EditError` if a setting that is in both differs; methods may be added, and names are not compared."""
    old, new = leaves(there), leaves(here)
    both = [name for name in new if name in old and not name.endswith(".name")]
    if other := differences({name: old[name] for name in both}, {name: new[name] for name in both}):
        raise EditError(f"{folder}: results of {what} ({other}); {WAYS_OUT}")


def _other(folder: Path, results: Sequence[Path] = ()) -> str | None:
    """Return the name of the first entry of a claimed folder that is not in `results`, or None."""
    return next((path.name for path in sorted(folder.iterdir()) if path.name != LOCK and path not in results), None)


def _released(builds: Mapping[str, str]) -> dict[str, str]:
    """Strip the local part of versions, which names the build's hardware: torch 2.9.1+cpu becomes 2.9.1."""
    return {name: str(version).partition("+")[0] for name, version in builds.items()}
