"""The journal that lets an interrupted run continue: `results.jsonl`, one JSON line per method, fact and moment.

Lines come in groups: the scores of all facts that one edit of one method was measured on, and last a line about the
model itself, which closes the group. A group without its last line is measured again as a whole, so that a run that
was interrupted gives the same figures as one that was not. A half-written last line is cut off.

Where several processes each measure their own facts, each appends to its own file (`results-3.jsonl`); the files are
merged in a fixed order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ffedit.errors import EditError
from ffedit.files.atomic import write_text
from ffedit.files.finite_json import finite

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

    def to_json(self) -> str:
        """Return the line as JSON text; numbers that are not finite become null, and `finite` is false then."""
        found = finite(self.found)
        words = {"method": self.method or None, "when": self.when, "chunk": self.chunk}
        words["fact"] = None if self.fact == WHOLE else self.fact
        return json.dumps({**words, **found, **({} if found == self.found else {"finite": False})}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Line:
        """Parse a line that `to_json` wrote."""
        found = json.loads(text)
        method, when, chunk, fact = (found.pop(name) for name in ("method", "when", "chunk", "fact"))
        return cls(method or UNEDITED, str(when), int(chunk), WHOLE if fact is None else int(fact), found)


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
        self._folder, self._writes = folder, writes
        self._own = folder / (RESULTS if process is None else f"results-{process}.jsonl")
        self.lines: dict[Key, Line] = {}
        for path in _files(folder):
            self.lines |= {line.key: line for line in _read(path)}
        if writes:
            _cut(self._own)

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
        new = [line for line in lines if line.key not in self.lines]
        texts = [line.to_json() for line in new]
        if self._writes:
            with self._own.open("a", encoding="utf-8") as file:
                file.write("".join(f"{text}\n" for text in texts))
                file.flush()
                os.fsync(file.fileno())
        # Parsed back from the text, so that a run that continues reports the same.
        self.lines |= {line.key: Line.from_json(text) for line, text in zip(new, texts, strict=True)}


def merge(folder: Path) -> None:
    """Append the lines of the processes' files to `results.jsonl`, sorted by their keys, and delete those files."""
    parts = [path for path in _files(folder) if path.name != RESULTS]
    if not parts:
        return
    lines = {line.key: line for line in _read(folder / RESULTS)}
    found = {line.key: line for path in parts for line in _read(path)}
    lines |= {key: found[key] for key in sorted(found, key=lambda key: (key[2], key[:2], key[3])) if key not in lines}
    write_text(folder / RESULTS, "".join(f"{line.to_json()}\n" for line in lines.values()))
    for path in parts:
        path.unlink()


def _files(folder: Path) -> list[Path]:
    """List the files of lines that exist, `results.jsonl` first."""
    parts = sorted(folder.glob("results-*.jsonl"), key=lambda path: (len(path.name), path.name))
    return [path for path in (folder / RESULTS, *parts) if path.exists()]


def _read(path: Path) -> list[Line]:
    """Read the lines of a file, without a half-written last one."""
    if not path.exists():
        return []
    lines, texts = [], path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, text in enumerate(texts, 1):
        try:
            lines.append(Line.from_json(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EditError(f"{path}, line {number}: damaged; start over with --force, or delete the line") from error
    return lines


def _cut(path: Path) -> None:
    """Cut a half-written last line off."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
