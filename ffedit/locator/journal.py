"""Long runs go on where they stopped: one JSON line per traced fact, in the cache.

A file belongs to one model and one set of settings, a line to one fact. Lines are appended whole; one that was torn by
an interruption is not read, and its fact is traced again.
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
    """The traces of one model under one set of settings that are kept already."""

    def __init__(self, editable: Editable, run: Run, facts: list[Fact]) -> None:
        # Another subject in a fact's place is drawn from the subjects of all facts.
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
        """The trace of `fact`, if it is kept."""
        return self._kept.get(_key(fact))

    def add(self, fact: Fact, trace: Trace) -> None:
        """Keep a trace; a cache that cannot be written is done without."""
        line = json.dumps({"fact": _key(fact), "trace": trace.to_dict()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")  # the line break in front ends a torn line
        except OSError:
            return


def _key(fact: Fact) -> str:
    asked = json.dumps([fact.text, fact.span, fact.previous, fact.target])
    return hashlib.sha256(asked.encode()).hexdigest()[:24]
