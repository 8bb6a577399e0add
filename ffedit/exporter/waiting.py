"""A process that loads its libraries and waits for one task; started early, it loads them while others work.

Nothing here needs torch, so the command line starts it before it loads its own libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ffedit.errors import CheckError


class Waiting:
    """A process that runs `python -m ffedit.exporter.verification`.

    Args:
        offline: nothing is to be asked of the hub: everything is on the disk.

    Raises:
        CheckError: the system starts no process.
    """

    def __init__(self, offline: bool = True) -> None:
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        self._elsewhere = tempfile.TemporaryDirectory()  # no file of the current folder is taken for a module
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ffedit.exporter.verification"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env=environment, cwd=self._elsewhere.name,
            )  # fmt: skip
        except OSError as error:
            self._elsewhere.cleanup()
            raise CheckError(f"the process that verifies could not be started ({error.strerror or error})") from error

    @property
    def waits(self) -> bool:
        """Whether it is still there: something may have ended it meanwhile."""
        return self._process.poll() is None

    def run(self, task: Mapping[str, Any]) -> tuple[int, list[str], list[str]]:
        """Give it the task: its exit code, and the lines that it wrote to stdout and stderr."""
        out, problems = self._process.communicate(json.dumps(task))
        return self._process.returncode, out.strip().splitlines(), problems.strip().splitlines()

    def close(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        self._process.communicate()
        self._elsewhere.cleanup()


_ready: list[Waiting] = []


@contextmanager
def prepared() -> Iterator[None]:
    """While the block runs, one waits: the first check in the block need not wait for its libraries."""
    try:
        process = Waiting()
    except CheckError:  # it is only early: the check will start one, or say why it cannot
        yield
        return
    with closing(process):
        _ready.append(process)
        try:
            yield
        finally:
            _ready[:] = [other for other in _ready if other is not process]


def waiting(offline: bool) -> Waiting:
    """The one that was prepared, if it is still there and will do; else a new one. To be closed."""
    ready = _ready.pop() if _ready and offline else None
    return ready if ready is not None and ready.waits else Waiting(offline)
