"""Resumption of long work that was stopped, by Ctrl-C, a kill or a full disk: the same mechanism for all of it.

Work of many small results appends each to a journal (`Journal`), work on tensors replaces its state from time to time
(`save_state`). Both record the settings they were made with, and other settings are refused (`differences`). Meanwhile
no other process works on the same folder (`claimed`), and an interrupt waits until the state is whole
(`placing.delay_interrupt`). A file that cannot be written, or is damaged, raises an EditError; but tensors that are
`kept` in the cache are then made anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ffedit.errors import EditError, brief
from ffedit.files import cache
from ffedit.files.atomic import read_whole, write_file
from ffedit.files.placing import named_errors
from ffedit.files.seal import check, sealed, unsealed
from ffedit.files.tensor_ranges import write

if sys.platform != "win32":
    import fcntl


class Journal:
    """A file of JSON lines that grows while a run goes on: first its settings, where there are any, then its results.

    It is begun if there is none. `settings`, plain JSON, are all on which results depend; a file with other settings is
    refused (EditError). None: a file of results alone.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._first = "" if settings is None else json_lines([{"settings": settings}])
        self.lines: list[Any] = read_journal(path)  # the results
        if settings is not None:
            if not self.lines:
                self.add()
            first, *self.lines = read_journal(path) or [unsealed(json.loads(self._first))]
            if "settings" not in first:
                raise EditError(f"{path}: does not say which settings it was begun with; delete it")
            if other := differences(first["settings"], json.loads(self._first)["settings"]):
                raise EditError(f"{path}: begun with other settings ({other}); delete it, or name another folder")

    def add(self, *lines: Mapping[str, Any]) -> None:
        """Append results, plain JSON, in one write; a file that does not exist, or is empty, gets the settings first.

        A file of the cache no longer exists if the cache was cleared meanwhile.
        """
        text = json_lines(lines)
        with named_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                _lock(file)
                _cut_torn_line(file)
                file.write(((self._first if file.seek(0, os.SEEK_END) == 0 else "") + text).encode())
                file.flush()
                os.fsync(file.fileno())
        # Parsed back, so that a resumed run has the same values.
        self.lines += (unsealed(json.loads(line)) for line in text.split("\n")[:-1])


def _lock(file: BinaryIO) -> None:
    """Lock a journal against other processes that append to it, as in the cache; closing the file unlocks it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            return


def _cut_torn_line(file: BinaryIO) -> None:
    """Remove a last line that a killed process, or a full disk, cut off."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def json_lines(values: Iterable[Mapping[str, Any]]) -> str:
    """Return each object as one line of JSON, with a checksum."""
    return "".join(json.dumps(sealed(value), ensure_ascii=False) + "\n" for value in values)


def read_journal(path: Path) -> list[Any]:
    """Parse the lines of a journal, none where there is no file; a last line that was cut off is left out."""
    try:
        texts = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EditError(f"{path}: cannot be read ({error.strerror})") from error
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(unsealed(json.loads(text)))
        except (ValueError, RecursionError) as error:
            raise EditError(f"{path}, line {number}: damaged; start over with --force, or delete the line") from error
    return lines


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe the settings that differ, nested ones by their dotted names; empty where none does."""
    old, new = leaves(there), leaves(here)
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
    return "; ".join(f"{name} {_brief(old.get(name))} there, {_brief(new.get(name))} now" for name in names[:4]) + more


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= leaves(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat


def _brief(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}…"


def save_state(path: Path, tensors: Mapping[str, Tensor], values: Any) -> None:
    """Replace the state of unfinished work: tensors, and `values`, which is plain JSON."""
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    matrices = {name: (t.dtype, tuple(t.shape), [t]) for name, t in tensors.items()}
    write_file(path, lambda made: write(made, matrices, state=json.dumps(values)))


def load_state(path: Path, refusal: str) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and values that `save_state` wrote; EditError, which says `refusal`, where there are none."""

    def read(path: Path) -> tuple[dict[str, Tensor], Any]:
        check(path)
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, values  # noqa: SIM118

    try:
        return read_whole(path, read)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EditError(f"{path}: {refusal} ({brief(error)})") from error


def kept(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of an entry of the cache, on the CPU, or those that `make` returns, which are kept there.

    An entry that is damaged, or that was written under another name, is made anew.
    """
    try:
        tensors, name = load_state(path, "holds other tensors")
    except EditError:
        tensors, name = {}, None
    if name == path.name:
        # Copies are aligned as new memory is, so that products have the same bits.
        return {key: tensor.clone() for key, tensor in tensors.items()}
    tensors = make()
    saved = {key: tensor.cpu() for key, tensor in tensors.items()}
    cache.write(path, partial(save_state, tensors=saved, values=path.name))
    return tensors
