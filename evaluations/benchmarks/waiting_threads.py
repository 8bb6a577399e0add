"""Measure the cost of threads that spin while they wait: `ffedit apply`, alone and beside a busy process.

    python evaluations/benchmarks/waiting_threads.py [--model NAME] --out FILE.json

The command line asks OpenMP for a short wait before torch is imported (`ffedit.cli.main`). Here the same command also
runs with OpenMP's own way of waiting, and without any spinning. The cases are measured in one run, in turn; only the
ratios apply to other machines.
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
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FACT = Path(__file__).parents[2] / "edits" / "eiffel-tower.json"
# By name, the code of the command and the variables that are set.
WAITS = {
    "spinning": ("import ffedit.cli; ffedit.cli.WAITS = {}; ffedit.cli.main()", {}),  # nothing is set
    "passive": ("from ffedit.cli import main; main()", {"OMP_WAIT_POLICY": "PASSIVE"}),
    "short": ("from ffedit.cli import main; main()", {}),
}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep other processes busy in the block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def seconds(wait: str, threads: int, model: str) -> float:
    """Return the seconds that `ffedit apply` takes in a process of its own."""
    code, variables = WAITS[wait]
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, "apply", str(FACT), "--model", model, "--layer", "1", "-q"],
        env=environment | variables | {"OMP_NUM_THREADS": str(threads)},
        check=True,
    )
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--busy", type=int, default=1, help="other processes")
    parser.add_argument("--model", default="atlas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds("short", args.threads, args.model)  # statistics are collected once
    taken = {}
    for others in (0, args.busy):
        with busy(others):
            rounds = [{wait: seconds(wait, args.threads, args.model) for wait in WAITS} for _ in range(args.rounds)]
        taken[others] = {wait: round(median(row[wait] for row in rounds), 1) for wait in WAITS}
    ratios = {others: {wait: round(row[wait] / row["short"], 2) for wait in WAITS} for others, row in taken.items()}
    load = [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None
    result = {
        "processors": os.cpu_count(),
        "threads": args.threads,
        "model": Path(args.model).name,
        "rounds": args.rounds,
        "load_at_end": load,
        "seconds_by_busy_processes": taken,
        "over_short": ratios,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
