"""Export, and measure the most memory of the verifying process if it compares tensors only.

That process then loads no model, as if the model took more than half of the free memory. On Linux `ru_maxrss` of a
process begins with that of the process that started it, so each process reads its own `VmHWM`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil

from ffedit.exporter import Exported, export, subprocess_check, verification
from ffedit.exporter.subprocess_check import run_module


def peak() -> int:
    """Return the peak of this process's resident memory, in bytes, on Linux."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measured(*arguments: Any) -> tuple[Exported, int]:
    """Return the result of `ffedit.export`, and the peak memory of the process that verified it, in bytes."""
    peaks: list[int] = []

    def run(_: str, question: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        process = run_module(Path(__file__).stem, question, {**environment, "PYTHONPATH": str(Path(__file__).parent)})
        peaks.append(int(process.stderr.split()[-1]))
        return process

    with patch.object(subprocess_check, "run_module", run):
        return export(*arguments), peaks[-1]


if __name__ == "__main__":
    with patch.object(psutil, "virtual_memory", lambda: SimpleNamespace(available=0)):
        verification.main()
    print(peak(), file=sys.stderr)
