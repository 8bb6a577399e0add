"""Conditions for saving an edit: that it took, and scores such as `efficacy>=0.95,specificity>=0.9`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ffedit.errors import FFEditError, RequirementError
from ffedit.evaluator.metrics import METRICS

if TYPE_CHECKING:
    from ffedit.evaluator import Scores, Verdict

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
TOLERANCE = 1e-9  # for rounding in a score, a mean of many numbers


@dataclass(frozen=True)
class Requirement:
    """Condition on one score: `name` compared with `bound`."""

    name: str
    comparison: str
    bound: float

    def miss(self, scores: Scores) -> str | None:
        """Describe how `scores` miss the condition, in words; None if they meet it."""
        value: float | None = getattr(scores, self.name)
        if value is None:
            return f"{self} cannot be measured: no prompts for it are given, or all are left out"
        above = 0.0 if abs(value - self.bound) <= TOLERANCE else value - self.bound
        digits = 6 if f"{value:.6g}" != f"{self.bound:.6g}" else 12
        met = COMPARISONS[self.comparison](above, 0.0)
        return None if met else f"{self} is not met: it is {value:.{digits}g}"

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.bound:.12g}"


def unmet(requirements: Sequence[Requirement], scores: Scores) -> RequirementError | None:
    """Return the error to raise for all conditions that `scores` do not meet; None if they meet every one."""
    misses = [miss for requirement in requirements if (miss := requirement.miss(scores))]
    return RequirementError(f"--require: {'; '.join(misses)}; no edit was saved") if misses else None


def not_taken(verdict: Verdict) -> RequirementError | None:
    """Return the error to raise for an edit that did not take; None for any other."""
    words = "the edit did not take; no edit was saved (--force saves it anyway)"
    return RequirementError(words) if verdict.outcome == "did not take" else None


def parse_requirements(text: str) -> list[Requirement]:
    """Read conditions separated by commas.

    Raises:
        FFEditError: a condition is not of the form SCORE>=NUMBER, or the score is not known.
    """
    requirements = []
    for condition in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*(>=|<=|>|<)\s*([-+.\deE]+)", condition)
        if match is None or match[1] not in METRICS:
            raise FFEditError(
                f"--require {condition!r} is not understood; write SCORE>=NUMBER with one of {', '.join(METRICS)}"
            )
        try:
            requirements.append(Requirement(match[1], match[2], float(match[3])))
        except ValueError as error:
            raise FFEditError(f"--require {condition!r}: {match[3]!r} is not a number") from error
    return requirements
