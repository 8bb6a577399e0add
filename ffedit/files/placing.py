"""Temporary folders that no kill leaves behind for good, and results that take their places whole.

What is written is made in a temporary folder beside its target and moved there when it is complete. The folder is
locked while its process lives, and a process that is killed releases its locks: so whoever writes there next can tell
an abandoned folder from another process's, and deletes it (`sweep`).

One move is one step of the file system. To replace a folder takes two: the old one is moved into the temporary
folder, under its name, and then the new one to its place; where that fails, the old one is moved back. Where a process
is killed between them, the temporary folder says so by its content, and `sweep` makes the second move.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ffedit.errors import EditError, brief

SUFFIX, RANDOM = ".unfinished", "[a-z0-9_]{8}"  # parts of a temporary folder's name: .TARGET.k3x_9a2b.unfinished
LOCK, MADE, OLD = ".lock", "made", "old"  # in a temporary folder: its lock, the result, and what it replaces
LONGEST = 60  # most bytes of the target's name in such a name: names of files have up to 255


@contextmanager
def named_errors(target: Path) -> Iterator[None]:
    """Raise an EditError that names `target` for an OSError, safetensors' own for a full disk, or a lone surrogate."""
    try:
        yield
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        raise EditError(f"{target}: cannot be written ({getattr(error, 'strerror', '') or brief(error)})") from error


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Delay an interrupt (Ctrl-C) until the end of the block, so that its changes are made whole or not at all."""
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


# Temporary folders --------------------------------------------------------------------------------


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield a new temporary folder in the folder of `target`; delete it, and those that killed processes left there."""
    above, name = target.absolute().parent, target.name
    sweep(above, name)
    while True:
        folder = Path(tempfile.mkdtemp(dir=above, prefix=_prefix(name), suffix=SUFFIX))
        lock = FileLock(folder / LOCK, timeout=0)
        try:
            lock.acquire()
            break
        except (Timeout, FileNotFoundError):  # another process has just taken the empty folder for abandoned
            continue
    try:
        yield folder
    finally:
        lock.release()  # first, because Windows deletes no open file
        _delete(folder)


def _delete(folder: Path) -> None:
    """Delete a temporary folder; what still cannot be deleted is left to the next `sweep`.

    It tries twice, since another program (a virus scanner, a network file system) may hold a file for a moment, and a
    temporary folder that stays inside a result would be part of it.
    """
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(name: str) -> str:
    return f".{os.fsencode(name)[:LONGEST].decode(errors='ignore')}."


def sweep(above: Path, name: str | None = None) -> None:
    """Finish the moves, and delete the temporary folders, that killed processes left in `above`.

    `name` restricts this to the folders of the target of this name. Folders of other users stay, and what cannot be
    read or deleted is left to the next process.
    """
    start = r"\..*" if name is None else re.escape(_prefix(name))
    pattern = re.compile(rf"{start}{RANDOM}{re.escape(SUFFIX)}", re.DOTALL)
    try:
        paths = [path for path in above.iterdir() if pattern.fullmatch(path.name)]
    except OSError:
        return
    for path in paths:
        try:
            status = path.lstat()
            # A folder of this user's, not a link: nobody else can have put anything into it.
            if stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid()):
                _recover(path)
        except OSError:  # Timeout, of a live process's lock, is an OSError
            continue


def _recover(folder: Path) -> None:
    """Finish the move that an abandoned folder is part of, and delete it; Timeout if a process still works with it."""
    with FileLock(folder / LOCK, timeout=0):
        for replaced in (folder / OLD).glob("*"):
            target = folder.parent / replaced.name
            for made in folder.glob(f"{MADE}*"):
                if not target.exists():
                    os.replace(made, target)
        # Before the lock is released: a process that has just created the folder may be about to lock it.
        _delete(folder)
    if sys.platform == "win32":  # which deletes no open file
        _delete(folder)


# Moves --------------------------------------------------------------------------------------------


def refuse_existing(target: Path) -> None:
    """Refuse a target that exists, unless it is an empty folder (EditError)."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise EditError(f"{target}: exists already; name another folder, or replace it with --force")


def refuse_folder(target: Path) -> None:
    """Refuse a folder where a file is to be written (EditError)."""
    if target.is_dir():
        raise EditError(f"{target}: cannot be written (a folder has this name)")


@contextmanager
def placed(target: Path, force: bool | None = None) -> Iterator[Path]:
    """Yield a path to make a file or folder at, which is moved to `target` if the block ends without an error.

    `force` says whether it replaces a target that another process has made meanwhile, or is refused; by default, a file
    replaces a file, and all else is refused. Where the move fails (EditError), everything is as before.
    """
    at = target.absolute()
    with ExitStack() as stack:
        with named_errors(target):
            folder = stack.enter_context(beside(at))
        made, old = folder / f"{MADE}{target.suffix}", folder / OLD / target.name
        yield made
        with named_errors(target):
            _set_permissions(made)
            if not force and (made.is_dir() or force is not None):
                refuse_existing(target)
            elif force is None:
                refuse_folder(target)
            with delay_interrupt():
                if at.is_dir():
                    old.parent.mkdir()
                    os.replace(at, old)
                try:
                    os.replace(made, at)
                except OSError:
                    if old.exists():
                        os.replace(old, at)
                    raise


def _set_permissions(made: Path) -> None:
    """Give files the permissions of new ones: some writers make theirs for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    made.stat()  # an OSError where nothing was made
    for path in (made, *made.rglob("*")):
        # A file with several hard links belongs to others, too.
        if path.is_file() and path.stat().st_nlink == 1:
            try:
                os.chmod(path, 0o666 & ~mask)
            except OSError:  # a file system without permissions
                return


@contextmanager
def claimed(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock a folder, which is created if need be, against every other process; a process that ends releases its lock.

    What killed processes left unfinished in the folder is deleted. Where another process holds it, `wait` until it is
    released, or raise an EditError.
    """
    lock = FileLock(folder / LOCK, timeout=-1 if wait else 0)
    with named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise EditError(f"{folder}: another run works on this folder; wait for it, or name another") from error
    try:
        sweep(folder)
        yield
    finally:
        if sys.platform != "win32":  # Windows deletes no open file
            (folder / LOCK).unlink(missing_ok=True)  # a process that has opened it meanwhile sees this, and tries again
        lock.release()
