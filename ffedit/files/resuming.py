"""Resumption of long work that was stopped, by Ctrl-C, a kill or a full disk: the same mechanism for all of it.

Work of many small results appends each to a journal (`Journal`), work on tensors replaces its state from time to time
(`save_state`). Both record the settings they were made with, and other settings are refused (`differences`). Meanwhile
no other process works on the same folder (`claimed`), and an interrupt waits until the state is whole
(`delay_interrupt`). What cannot be written, or was damaged, is an EditError.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ffedit.errors import EditError, brief
from ffedit.files.atomic import named_errors, write_file

LOCK = ".lock"


class Journal:
    """A file of JSON lines that grows while a run goes on: first its settings, where there are any, then its results.

    Args:
        path: the file; begun if there is none.
        settings: what the results depend on, plain JSON; None for a file of results alone. Others than those that the
            file was begun with are refused.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.lines: list[Any] = read_journal(path)  # the results
        with named_errors(path):
            if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):  # its last line was cut off
                os.truncate(path, content.rfind(b"\n") + 1)
        if settings is not None:
            if not self.lines:
                self.add({"settings": settings})
            if other := differences(self.lines.pop(0)["settings"], json.loads(json.dumps(settings))):
                raise EditError(f"{path}: begun with other settings ({other}); delete it, or name another folder")

    def add(self, *lines: Any) -> None:
        """Append results, plain JSON, all of them in one write."""
        text = json_lines(lines)
        with named_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        self.lines += map(json.loads, text.split("\n")[:-1])  # parsed back, so that a run that is resumed has the same


def json_lines(values: Iterable[Any]) -> str:
    """Return each value as one line of JSON."""
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


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
            lines.append(json.loads(text))
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
    about = {"state": json.dumps(values)}
    write_file(path, lambda made: save_file(dict(tensors), made, metadata=about))


def load_state(path: Path, refusal: str) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and values that `save_state` wrote; EditError, which says `refusal`, where there are none."""
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, values  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EditError(f"{path}: {refusal} ({brief(error)})") from error


@contextmanager
def claimed(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock a folder, which is created if need be, against every other process; a process that ends releases its lock.

    Where another process holds it, `wait` until it is released, or raise an EditError.
    """
    lock = FileLock(folder / LOCK, timeout=-1 if wait else 0)
    with named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise EditError(f"{folder}: another run works on this folder; wait for it, or name another") from error
    try:
        yield
    finally:
        if sys.platform != "win32":  # Windows deletes no open file
            (folder / LOCK).unlink(missing_ok=True)  # a process that has opened it meanwhile sees this, and tries again
        lock.release()


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Delay an interrupt (Ctrl-C) until the end of the block, so that what it adds is added whole or not at all."""
    main = threading.current_thread() is threading.main_thread()  # only this thread is interrupted or may set a handler
    before = signal.getsignal(signal.SIGINT)
    if not main or before is None:
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        signal.raise_signal(signal.SIGINT)
