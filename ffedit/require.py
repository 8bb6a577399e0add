"""Conditions on scores, such as `efficacy>=0.95,specificity>=0.9`, for scripts and CI."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from ffedit.errors import FFEditError, RequirementError
from ffedit.evaluator import Scores

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Requirement:
    """One condition: score `name` compared with `bound`."""

    name: str
    comparison: str
    bound: float

    def check(self, scores: Scores) -> None:
        """Raise RequirementError unless `scores` meet it."""
        value: float | None = getattr(scores, self.name)
        if value is None:
            raise RequirementError(f"--require {self}: there was nothing to measure {self.name} on; add such prompts")
        if not COMPARISONS[self.comparison](value, self.bound):
            raise RequirementError(f"--require {self} is not met: {self.name} is {value:.3f}; nothing was written")

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.bound:g}"


def parse_requirements(text: str) -> list[Requirement]:
    """Read conditions separated by commas.

    Raises:
        FFEditError: a condition is not of the form SCORE>=NUMBER, or the score is not known.
    """
    names = [field.name for field in fields(Scores)]
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*(>=|<=|>|<)\s*([-+.\deE]+)", part)
        if match is None or match[1] not in names:
            raise FFEditError(
                f"--require {part!r} is not understood; write SCORE>=NUMBER with one of {', '.join(names)}"
            )
        try:
            found.append(Requirement(match[1], match[2], float(match[3])))
        except ValueError as error:
            raise FFEditError(f"--require {part!r}: {match[3]!r} is not a number") from error
    return found
