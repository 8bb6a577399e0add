"""Atomic writes: a folder or file is written to a temporary path beside its target and moved there when complete.

Where a target cannot be written, every function raises an EditError that names it.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ffedit.errors import EditError, brief


@contextmanager
def named_errors(target: Path) -> Iterator[None]:
    """Raise an EditError that names `target` for an OSError, safetensors' own for a full disk, or a lone surrogate."""
    try:
        yield
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        raise EditError(f"{target}: cannot be written ({getattr(error, 'strerror', '') or brief(error)})") from error


def check_free(target: Path, force: bool) -> None:
    """Refuse a target that exists (unless empty, or with `force`) or cannot be created; before any long work."""
    with named_errors(target):
        if target.exists() and not force and not (target.is_dir() and not any(target.iterdir())):
            raise EditError(f"{target}: exists already; name another folder, or replace it with --force")
        above = next(folder for folder in target.absolute().parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(dir=above, prefix=f".{target.name}."))


def check_file(target: Path) -> None:
    """Refuse a folder, or a file that cannot be written; before any long work."""
    with named_errors(target):
        if target.is_dir():
            raise EditError(f"{target}: cannot be written (a folder has this name)")
        if not target.exists():
            tempfile.TemporaryFile(dir=target.absolute().parent).close()
        elif not os.access(target, os.W_OK):
            raise EditError(f"{target}: cannot be written (no permission)")


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
    with named_errors(target):
        folder = Path(tempfile.mkdtemp(dir=target.resolve().parent, prefix=f".{target.name}."))
    try:
        made = folder / f"made{target.suffix}"
        with named_errors(target):
            write(made)
        yield
        with named_errors(target):
            _set_permissions(folder)
            os.replace(made, target.resolve())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def written(target: Path, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends without an error, and is deleted otherwise."""
    check_free(target, force)
    with named_errors(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}."))
    try:
        with named_errors(target):
            yield temporary
            _set_permissions(temporary)
            _move(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_permissions(folder: Path) -> None:
    """Give a folder and its files the permissions of new ones: some writers make theirs for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(folder, 0o777 & ~mask)
    for path in folder.rglob("*"):
        # A file with several hard links belongs to others, too.
        if path.is_file() and path.stat().st_nlink == 1:
            os.chmod(path, 0o666 & ~mask)


def _move(temporary: Path, target: Path) -> None:
    """Move `temporary` to `target`; an existing target is deleted only after the new one is there."""
    if not target.exists():
        os.replace(temporary, target)
        return
    old = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}.")) / "old"
    os.replace(target, old)
    try:
        os.replace(temporary, target)
    except OSError:
        os.replace(old, target)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def finite(value: Any) -> Any:
    """Replace each NaN and infinity in `value`, which strict JSON does not have, by None, and tuples by lists."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
