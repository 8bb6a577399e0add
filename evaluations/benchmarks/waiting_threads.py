"""What threads that spin while they wait cost: `ffedit apply`, alone and beside a busy process, with and without.

    python evaluations/benchmarks/waiting_threads.py --out FILE.json

The command line asks OpenMP for a passive wait before torch is imported (`ffedit.cli.main`). Here the same command also
runs as OpenMP waits by itself. The four cases are measured in one run, each beside the same load of the machine as far
as that does not change; what holds elsewhere are the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FACT = Path(__file__).parents[2] / "edits" / "eiffel-tower.json"
WAITS = {
    "spinning": "import sys; from ffedit.cli import invoke; sys.exit(invoke(sys.argv[1:]))",  # main without its setting
    "passive": "from ffedit.cli import main; main()",
}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many other processes busy for the length of a block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def seconds(code: str, threads: int) -> float:
    """Return the seconds that `ffedit apply` takes in a process of its own."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, "apply", str(FACT), "--layer", "1", "-q"],
        env=environment | {"OMP_NUM_THREADS": str(threads)},
        check=True,
    )
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--busy", type=int, default=1, help="other processes")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    seconds(WAITS["passive"], asked.threads)  # statistics are collected once
    taken = {}
    for others in (0, asked.busy):
        with busy(others):
            taken[others] = {name: round(seconds(code, asked.threads), 1) for name, code in WAITS.items()}
    ratios = {others: round(both["spinning"] / both["passive"], 2) for others, both in taken.items()}
    load = [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None
    result = {
        "processors": os.cpu_count(),
        "threads": asked.threads,
        "load_at_end": load,
        "seconds_by_busy_processes": taken,
        "spinning_over_passive": ratios,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if asked.out is not None:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
