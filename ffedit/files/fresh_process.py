"""A module of ffedit run in a process of its own, which has nothing of this one in its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_module(module: str, question: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` with `question` on its stdin, and return how it ended and what it wrote.

    `environment` is added to that of this process. Raises OSError where no process can be started.
    """
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return subprocess.run(  # noqa: S603  # no shell, and each module is named in our own code
        [sys.executable, "-m", module],
        # Python looks for modules in the working folder first: no file of the current one is to be taken for one.
        input=question, capture_output=True, text=True, cwd=package, check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
