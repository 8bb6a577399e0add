"""A folder or file appears whole or not at all: it is written beside its place and moved there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ffedit.errors import EditError


def check_free(target: Path, force: bool) -> None:
    """Refuse a target that holds something already, or that could not be made; to be called before any long work.

    Raises:
        EditError: the target exists, is not an empty folder, and `force` is not set; or its place cannot be written.
    """
    with _told(target):
        if target.exists() and not force and not (target.is_dir() and not any(target.iterdir())):
            raise EditError(f"{target}: exists already; name another folder, or replace it with --force")
        above = next(folder for folder in target.absolute().parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(dir=above, prefix=f".{target.name}."))


def check_file(target: Path) -> None:
    """Refuse a file that could not be written; to be called before any long work.

    Raises:
        EditError: the target is a folder, or its folder is not there or cannot be written.
    """
    with _told(target):
        if target.is_dir():
            raise EditError(f"{target}: cannot be written (a folder has this name)")
        if not target.exists():
            tempfile.TemporaryFile(dir=target.absolute().parent).close()
        elif not os.access(target, os.W_OK):
            raise EditError(f"{target}: cannot be written (no permission)")


def write_text(target: Path, text: str) -> None:
    """Write a file of UTF-8 text, whole or not at all; what is no file (a pipe, a device) is written directly.

    Raises:
        EditError: it cannot be written.
    """
    with text_ready(target, text):
        pass


@contextmanager
def text_ready(target: Path, text: str) -> Iterator[None]:
    """As `write_text`: the file is there in full, but takes its place only when the block ends well."""
    if target.exists() and not target.is_file():
        yield
        with _told(target):
            target.write_text(text, encoding="utf-8")
        return
    with ready(target, lambda made: made.write_text(text, encoding="utf-8")):
        yield


@contextmanager
def placed(target: Path) -> Iterator[Path]:
    """A temporary file that becomes `target` when the block ends well, and vanishes when it does not.

    Raises:
        EditError: it cannot be written.
    """
    with _beside(target) as made, _told(target):
        yield made
        _take_place(made, target)


@contextmanager
def ready(target: Path, write: Callable[[Path], object]) -> Iterator[None]:
    """What `write` makes of a temporary file becomes `target` when the block ends well; else it vanishes.

    Raises:
        EditError: it cannot be written.
    """
    with _beside(target) as made:
        with _told(target):
            write(made)
        yield
        with _told(target):
            _take_place(made, target)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A name for a temporary file where `target` is to be."""
    with _told(target):
        folder = tempfile.mkdtemp(dir=target.resolve().parent, prefix=f".{target.name}.")
    try:
        yield Path(folder) / f"made{target.suffix}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_place(made: Path, target: Path) -> None:
    _open_up(made.parent)
    os.replace(made, target.resolve())


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Say of which file or folder something failed.

    Raises:
        EditError: it did.
    """
    try:
        yield
    except OSError as error:
        raise EditError(f"{target}: cannot be written ({error.strerror or error})") from error


@contextmanager
def written(target: Path, force: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes when it does not.

    Raises:
        EditError: the target exists, or cannot be written.
    """
    check_free(target, force)
    with _told(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}."))
    try:
        with _told(target):
            yield temporary
            _open_up(temporary)
            _move(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open_up(folder: Path) -> None:
    """Give a folder and its files the rights that new ones have: some writers make theirs for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(folder, 0o777 & ~mask)
    for path in folder.rglob("*"):
        # A file of several names belongs to others, too.
        if path.is_file() and path.stat().st_nlink == 1:
            os.chmod(path, 0o666 & ~mask)


def _move(temporary: Path, target: Path) -> None:
    """Put `temporary` in the place of `target`; what stood there goes only when the new one stands."""
    if target.exists():
        old = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}.")) / "old"
        os.replace(target, old)
        try:
            os.replace(temporary, target)
        except OSError:
            os.replace(old, target)
            raise
        finally:
            shutil.rmtree(old.parent, ignore_errors=True)
    else:
        os.replace(temporary, target)
