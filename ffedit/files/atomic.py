"""Atomic writes: a folder or file is made in a temporary folder beside its target and moved there when complete.

Where a target cannot be written, every function raises an EditError that names it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ffedit.errors import EditError, brief
from ffedit.files.placing import beside, named_errors, placed, refuse_existing, refuse_folder, sweep

Read = TypeVar("Read")


def check_free(target: Path, force: bool, folder: bool = False) -> None:
    """Refuse a target that exists (unless empty, or with `force`) or cannot be created; before any long work.

    Even with `force`, a folder is replaced only if it holds weights, as all folders of ffedit do, and neither is nor
    contains the working folder; a file, only if it is a GGUF file, and not by a `folder`. What a killed process was
    about to move there is moved first.
    """
    with named_errors(target):
        sweep(target.absolute().parent, target.name)
        if not behind_links(target).exists() and target.is_symlink() and target.suffix != ".gguf":
            raise EditError(f"{target}: is a link that leads nowhere; remove it, or name another folder")
        if not force:
            refuse_existing(target)
        elif target.is_dir():
            here, itself = Path.cwd(), target.resolve()
            if itself in (here, *here.parents):
                raise EditError(
                    f"{target}: is the working folder, or contains it, and is not replaced; name another folder"
                )
            if any(target.iterdir()) and not any(target.glob("*.safetensors")):
                raise EditError(
                    f"{target}: holds no weights, so ffedit did not write it, and --force does not replace it; name "
                    "another folder, or remove it first"
                )
        elif target.is_file() and (folder or target.suffix != ".gguf"):
            raise EditError(f"{target}: is a file, which --force does not replace by a folder; name another folder")
        if folder and target.suffix == ".gguf":
            raise EditError(f"{target}: is the name of a GGUF file, where a folder was expected; name a folder")
        above = next(parent for parent in target.absolute().parents if parent.exists())
        with beside(above / target.name):
            pass


def check_file(target: Path, appended: bool = False) -> None:
    """Refuse a folder, or a file that cannot be written, before any long work; delete what killed processes left.

    A file that is `appended` to is not replaced, so its folder need not be writable.
    """
    with named_errors(target):
        behind = behind_links(target)
        sweep(behind.parent, behind.name)
        refuse_folder(target)
        if target.exists() and not os.access(target, os.W_OK):
            raise EditError(f"{target}: cannot be written (no permission)")
        if not target.exists() or (target.is_file() and not appended):  # a pipe or a device is written directly
            with beside(behind):
                pass


def behind_links(target: Path) -> Path:
    """Return the path that `target` leads to; EditError where its links lead in a circle."""
    behind = Path(os.path.realpath(target))  # never fails: for a circle it returns one of the links
    if behind.is_symlink():
        raise EditError(f"{target}: is a link that leads in a circle; remove it, or name another path")
    return behind


def write_text(target: Path, text: str) -> None:
    """Write a file of UTF-8 text, whole or not at all; directly where the target is no file (a pipe, a device)."""
    with text_ready(target, text):
        pass


@contextmanager
def text_ready(target: Path, text: str) -> Iterator[None]:
    """Write as `write_text` does, but move the complete file to `target` only when the block ends without an error."""
    if target.exists() and not target.is_file():
        yield
        with named_errors(target):
            target.write_text(text, encoding="utf-8")
        return
    with ready(target, lambda made: made.write_text(text, encoding="utf-8")):
        yield


def write_file(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file at a temporary path, and move it to `target`."""
    with ready(target, write):
        pass


@contextmanager
def ready(target: Path, write: Callable[[Path], object]) -> Iterator[None]:
    """Let `write` make a temporary file that becomes `target` when the block ends without an error; else delete it."""
    with placed(behind_links(target)) as made:  # a link stays: what it points to is replaced
        with named_errors(target):
            write(made)
        yield


@contextmanager
def written(target: Path, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends without an error, and is deleted otherwise."""
    check_free(target, force, folder=True)
    with named_errors(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with placed(target, force) as made:
            made.mkdir()
            yield made


def refuse_link(path: Path, base: Path) -> None:
    """Refuse a link to a file outside both a checkpoint and the folder of its config file: it would be exported.

    A snapshot in the hub's cache is a folder of links into a folder of blobs.
    """
    target, folders = path.resolve(), {base.resolve(), (base / "config.json").resolve().parent}
    if not folders & set(target.parents):
        raise EditError(f"{path}: a link to {target}, out of the checkpoint; put a copy in its place, or delete it")


def read_whole(path: Path, read: Callable[[Path], Read]) -> Read:
    """Return what `read` makes of one version of a file that other processes may replace meanwhile.

    safetensors opens a file twice, for its header and for its numbers, which may then be of two versions.
    """
    while True:
        error: Exception | None = None
        with path.open("rb") as file:  # while it is open, no other file has its inode
            try:
                content = read(path)
            except Exception as raised:  # where the sizes differ, torch raises a RuntimeError
                error = raised
            replaced = path.exists() and not os.path.samestat(os.fstat(file.fileno()), path.stat())
        if not replaced:
            if error is not None:
                raise error
            return content


@contextmanager
def os_errors() -> Iterator[None]:
    """Raise an OSError for any error of the libraries that write a model, such as the bare Exceptions of tokenizers."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(brief(error)) from error


def finite(value: Any) -> Any:
    """Replace each NaN and infinity in `value`, which strict JSON does not have, by None, and tuples by lists."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
