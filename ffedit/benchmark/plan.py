"""The modes of a benchmark, each as one list of chunks of facts that are edited together.

    single            each fact alone, on the unedited model
    batch:N           N facts at once, on the unedited model
    sequential[:N]    N facts at once (1 by default), on top of all before

A subject has one key, so its facts are never split: a chunk ends with the first subject that fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ffedit.errors import EditError
from ffedit.facts.fact import Fact

CHECKPOINTS = 10


@dataclass(frozen=True)
class Mode:
    """The mode of a benchmark: the number of facts written at once, and whether edits accumulate.

    Attributes:
        name: "single", "batch" or "sequential".
        size: minimum number of facts per chunk (the last chunk takes what is left).
    """

    name: str
    size: int = 1

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read `single`, `batch:N`, `sequential` or `sequential:N`.

        Raises:
            EditError: it is none of these.
        """
        name, colon, size = text.partition(":")
        sized = size.isdecimal() and int(size) > 0
        if not (text in ("single", "sequential") or (name in ("batch", "sequential") and sized)):
            raise EditError(f"mode {text!r} is not known; give single, batch:N or sequential[:N], N at least 1")
        return cls(name, int(size) if colon else 1)

    def __str__(self) -> str:
        return self.name if self.name == "single" else f"{self.name}:{self.size}"

    @property
    def sequential(self) -> bool:
        """True if every edit stays in the model."""
        return self.name == "sequential"

    def chunks(self, facts: Sequence[Fact]) -> list[tuple[int, ...]]:
        """Divide the indices of `facts` into chunks that are written together; each index is in exactly one."""
        if self.name == "single":
            return [(i,) for i in range(len(facts))]
        groups: dict[str, list[int]] = {}
        for i, fact in enumerate(facts):
            groups.setdefault(fact.subject, []).append(i)
        chunks: list[list[int]] = []
        for group in groups.values():
            if not chunks or len(chunks[-1]) >= self.size:
                chunks.append([])
            chunks[-1] += group
        return [tuple(chunk) for chunk in chunks]


def checkpoints(chunks: Sequence[Sequence[int]]) -> list[int]:
    """Choose the chunks after which all facts so far are scored: about ten, evenly spaced; the last is the end."""
    ends = list(accumulate(map(len, chunks)))
    wanted = [ends[-1] * tenth / CHECKPOINTS for tenth in range(1, CHECKPOINTS + 1)]
    return sorted({next(i for i, end in enumerate(ends) if end >= least) for least in wanted})
