"""Cache traces so that an interrupted run can be resumed: one JSON line per traced fact.

A file belongs to one model and one set of settings, a line to one fact. Lines are appended whole; a line truncated by
an interruption is skipped, and its fact is traced again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from ffedit.facts.fact import Fact
from ffedit.files import cache
from ffedit.locator.cases import Run
from ffedit.locator.corruption import takes_others
from ffedit.locator.result import Trace
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.version import __version__


class Journal:
    """Cached traces of one model under one set of settings."""

    def __init__(self, editable: Editable, run: Run, facts: list[Fact]) -> None:
        # Replacements, and σ over the subjects, depend on the subjects of all facts.
        others = sorted({fact.subject for fact in facts}) if takes_others(run.corruption) else []
        mark = json.dumps([__version__, fingerprint(editable), editable.chat, asdict(run), others])
        self.path: Path = cache.path("traces", hashlib.sha256(mark.encode()).hexdigest()[:24], ".jsonl")
        self._kept: dict[str, Trace] = {}
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # none yet
            text = ""
        for line in text.split("\n"):
            try:
                entry = json.loads(line)
                self._kept[entry["fact"]] = Trace.from_dict(entry["trace"])
            except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
                continue

    def find(self, fact: Fact) -> Trace | None:
        """Return the cached trace of `fact`, or None."""
        return self._kept.get(_key(fact))

    def add(self, fact: Fact, trace: Trace) -> None:
        """Append a trace; do nothing if the cache cannot be written."""
        line = json.dumps({"fact": _key(fact), "trace": trace.to_dict()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")  # the leading line break ends a truncated line
        except OSError:
            return


def _key(fact: Fact) -> str:
    asked = json.dumps([fact.text, fact.span, fact.previous, fact.target])
    return hashlib.sha256(asked.encode()).hexdigest()[:24]
