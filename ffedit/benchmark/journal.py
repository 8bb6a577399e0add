"""The journal that lets an interrupted run continue: `results.jsonl`, one JSON line per method, fact and moment.

Lines come in groups: the scores of all facts that one edit of one method was measured on, and last a line about the
model itself, which closes the group. A group without its last line is measured again as a whole, so that a run that
was interrupted gives the same figures as one that was not. A half-written last line is cut off.

Where several processes each measure their own facts, each appends to its own file (`results-3.jsonl`); the files are
merged in a fixed order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ffedit.errors import EditError
from ffedit.files import resuming
from ffedit.files.atomic import finite, write_text

RESULTS = "results.jsonl"
# method, moment, chunk, index of the fact
Key: TypeAlias = tuple[str, str, int, int]
# As method: the unedited model. As index of a fact: the whole model; this line closes a group.
UNEDITED, WHOLE = "", -1


@dataclass(frozen=True)
class Line:
    """The measurements of one fact, or of the whole model, at one moment.

    Attributes:
        method: the method that edited the model; `UNEDITED` before any edit.
        when: "before", "after" the fact's own edit, "end", or "at 20": when 20 facts were edited.
        chunk: index of the edit; in a sequence, of the last one so far.
        fact: index of the fact; `WHOLE` for the model.
        found: the measurements, plain JSON.
    """

    method: str
    when: str
    chunk: int
    fact: int
    found: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """The identity of the line: of two lines with one key, one is kept."""
        return self.method, self.when, self.chunk, self.fact

    def to_dict(self) -> dict[str, Any]:
        """Return the line as plain JSON; numbers that are not finite become null, and `finite` is false then."""
        found = finite(self.found)
        words = {"method": self.method or None, "when": self.when, "chunk": self.chunk}
        words["fact"] = None if self.fact == WHOLE else self.fact
        return {**words, **found, **({} if found == self.found else {"finite": False})}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Line:
        """Return the line that `to_dict` was called on."""
        found = dict(line)
        method, when, chunk, fact = (found.pop(name) for name in ("method", "when", "chunk", "fact"))
        return cls(method or UNEDITED, when, chunk, WHOLE if fact is None else fact, found)


class Journal:
    """The lines of a results folder.

    Args:
        folder: results folder.
        process: rank of this process, if each writes its own file; None for `results.jsonl`.
        writes: whether this process writes to disk; otherwise added lines are only held in memory.

    Raises:
        EditError: a line that is not the last one is damaged.
    """

    def __init__(self, folder: Path, process: int | None = None, writes: bool = True) -> None:
        own = folder / (RESULTS if process is None else f"results-{process}.jsonl")
        self.lines = {line.key: line for path in _files(folder) for line in _read(path)}
        self._file = resuming.Journal(own) if writes else None

    def done(self, method: str, when: str, chunk: int) -> bool:
        """Check whether a group is complete."""
        return (method, when, chunk, WHOLE) in self.lines

    def failed(self, method: str, chunk: int) -> bool:
        """Check whether the journal records that an edit could not be made."""
        line = self.lines.get((method, "after", chunk, WHOLE))
        return line is not None and "error" in line.found

    def add(self, lines: Iterable[Line]) -> None:
        """Add the lines that are not in the journal yet.

        Raises:
            OSError: they cannot be written.
        """
        new = {line.key: line.to_dict() for line in lines if line.key not in self.lines}
        if self._file is not None:
            with needed():
                self._file.add(*new.values())
        # Parsed back from the text, so that a run that continues reports the same.
        self.lines |= {key: Line.from_dict(json.loads(json.dumps(line))) for key, line in new.items()}


def merge(folder: Path) -> None:
    """Append the lines of the processes' files to `results.jsonl`, sorted by their keys, and delete those files."""
    parts = [path for path in _files(folder) if path.name != RESULTS]
    if not parts:
        return
    lines = {line.key: line for line in _read(folder / RESULTS)}
    found = {line.key: line for path in parts for line in _read(path)}
    lines |= {key: found[key] for key in sorted(found, key=lambda key: (key[2], key[:2], key[3])) if key not in lines}
    write_text(folder / RESULTS, resuming.json_lines(line.to_dict() for line in lines.values()))
    for path in parts:
        path.unlink()


def _files(folder: Path) -> list[Path]:
    """List the files of lines that exist, `results.jsonl` first."""
    parts = sorted(folder.glob("results-*.jsonl"), key=lambda path: (len(path.name), path.name))
    return [path for path in (folder / RESULTS, *parts) if path.exists()]


def _read(path: Path) -> list[Line]:
    return [Line.from_dict(line) for line in resuming.read_journal(path)]


@contextmanager
def needed() -> Iterator[None]:
    """Turn an `EditError` inside the block into an `OSError`: a full disk ends the run and is not a failed edit.

    Raises:
        OSError: something cannot be written.
    """
    try:
        yield
    except EditError as error:
        raise OSError(str(error)) from error
