"""How an edit was found: what it needs to be repeated, judged and undone, as plain JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor

from ffedit.algebra import double
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job
from ffedit.editor.target import Value
from ffedit.editor.wording import Wording
from ffedit.facts import Fact
from ffedit.fingerprint import fingerprint
from ffedit.lowrank import Dense, LowRank, Update
from ffedit.memory import Address, KeyValueMemory, identity
from ffedit.moments import KeyMoments
from ffedit.version import __version__


class Record:
    """What a method notes while it works; an `Edit` in the end.

    Args:
        method: its name.
        job: what it is to do.

    Attributes:
        kept: per memory, the keys that `after` stored there, without those of subjects that are edited now, [d_ff, p].
    """

    def __init__(self, method: str, job: Job) -> None:
        memories, facts, after = job.memories, job.facts, job.after
        self._facts = tuple(facts)
        self._updates: dict[Address, Update] = {}
        self._keys: dict[Address, Tensor] = {}
        self._values: dict[Address, Tensor] = {}
        self.kept = {memory.address: _kept(memory, facts, after) for memory in memories}
        self._about: dict[str, Any] = {
            "method": method,
            "model": job.editable.name,
            "base": fingerprint(job.editable),
            "dtype": str(memories[0].weight.dtype).removeprefix("torch."),
            "layers": list(job.layers),
            "after": [edit.fingerprint() for edit in after],
            "matrices": {str(memory.address): identity(memory) for memory in memories},
            "norms": {str(memory.address): float(double(memory.value).norm()) for memory in memories},
            "subjects": {},
            "division": {},
            "config": asdict(job.config),
            "statistics": {str(at): _statistics(job.stats[at]) for at in self.kept if at in job.stats},
            "versions": versions(),
        }

    def add(
        self,
        memory: KeyValueMemory,
        delta: LowRank,
        subjects: Sequence[str],
        keys: Tensor,
        values: Tensor,
        division: Sequence[float],
        guarantee: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Note the change of one memory: key [d_ff, n], value [d_model, n] and division factor of each subject.

        `guarantee` is what the method promises of it, and what came of that.
        """
        at = memory.address
        self._about["subjects"][str(at)] = list(subjects)
        self._updates[at] = delta.cpu()
        self._keys[at], self._values[at] = keys.cpu(), values.cpu()
        self._about["division"][str(at)] = list(division)
        if guarantee:
            self._about.setdefault("guarantee", {})[str(at)] = dict(guarantee)

    def add_dense(self, memory: KeyValueMemory, delta: Tensor) -> None:
        """Note a change, [d_model, d_ff], that was not solved for."""
        self._updates[memory.address] = Dense(double(delta).cpu())

    def edit(self, solved: Sequence[Mapping[str, Any]]) -> Edit:
        """The finished edit; `solved` says how each value was found."""
        norms = self._about["norms"]
        ratio = max(delta.norm() / norms[str(at)] for at, delta in self._updates.items())
        about = {**self._about, "norm_ratio": ratio, "solved": list(solved)}
        return Edit(self._updates, self._keys, self._values, self._facts, about)


def divisions(delta: LowRank, C: Tensor) -> list[float]:
    """1 / (u C uᵀ) of each row u of the right factor: of one fact written by equality, its division factor kᵀC⁻¹k.

    Among several facts, what of it no other key holds. Tiny factors make huge updates.
    """
    found: list[float] = (1.0 / ((delta.right @ C) * delta.right).sum(1)).tolist()
    return found


def how_solved(
    groups: Sequence[Sequence[Fact]], wordings: Sequence[Wording], values: Sequence[Value]
) -> list[dict[str, Any]]:
    """How each subject's value was found."""
    return [
        {
            "subject": facts[0].subject,
            "facts": len(facts),
            "probabilities": list(value.probabilities),
            "loss": list(value.losses),
            "delta_norm": float(value.delta.norm()),
            "contexts": list(wording.prefixes),
            "own_phrasings": len(wording.stated) - len(wording.prompts),
        }
        for facts, wording, value in zip(groups, wordings, values, strict=True)
    ]


def _kept(memory: KeyValueMemory, facts: Sequence[Fact], after: Sequence[Edit]) -> Tensor:
    """Keys that earlier edits stored in `memory`, but for subjects that are written anew, [d_ff, p]."""
    again = {fact.subject for fact in facts}
    found = [torch.empty(memory.d_ff, 0, dtype=torch.float64)]
    for edit in after:
        other = [i for i, subject in enumerate(edit.subjects(memory.address)) if subject not in again]
        if other:
            found.append(double(edit.keys[memory.address][:, other]))
    return torch.cat(found, 1)


def _statistics(moments: KeyMoments) -> dict[str, Any]:
    return {
        "corpus": moments.source,
        "tokens": moments.count,
        "ridge": moments.ridge,
        "condition": moments.condition,
        "fingerprint": moments.fingerprint,
    }


def versions() -> dict[str, str]:
    """What computed this."""
    return {
        "ffedit": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
