"""How a reliability driver counts: cases of each kind, and each failure with what repeats it; one report a driver.

A case that fails does not end a run: a run tells how often a promise was kept. It exits with 1 if one was broken.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ffedit.editor.provenance import versions

HERE = Path(__file__).parents[2]
REPORTS = HERE / "evaluations" / "reports" / "reliability"


@dataclass
class Tally:
    """Cases by kind, and those in which `promise` was broken."""

    promise: str  # one sentence, as docs/reliability.md prints it
    cases: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def count(self, kind: str, case: Any, fault: str | None = None) -> None:
        """Count a case; `fault` says what was seen and expected where it failed, `case` what repeats it (JSON)."""
        self.cases[kind] += 1
        if fault is not None:
            self.failures.append({"kind": kind, "case": case, "fault": fault})
            print(f"FAILED {kind} {case}: {fault}", file=sys.stderr, flush=True)

    def finish(self, out: Path | None, **how: Any) -> NoReturn:
        """Print the count, write it to `out` as JSON with `how` (seed, …), and exit: 0 without failures, else 1."""
        program = Path(sys.argv[0]).resolve()
        name = program.relative_to(HERE) if program.is_relative_to(HERE) else program.name
        report = {
            "promise": self.promise,
            "command": shlex.join(["python", str(name), *sys.argv[1:]]),
            "cases": dict(sorted(self.cases.items())),
            "failures": self.failures,
            "seconds": round(time.perf_counter() - self.started, 1),
            "platform": platform.platform(),
            "versions": versions(),
            **how,
        }
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            made = out.with_name(f".{out.name}")
            made.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(made, out)
        for kind, cases in sorted(self.cases.items()):
            failed = sum(failure["kind"] == kind for failure in self.failures)
            print(f"{kind:40} {cases:7,} cases, {failed} failed")
        sys.exit(bool(self.failures))
