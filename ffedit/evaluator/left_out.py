"""What a score was not measured on, though it was given: counted, so that a mean over fewer prompts tells so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffedit.evaluator.scores import FactScores

SAMPLED = "outside the sample whose distributions are kept"
# Of scores that leave prompts of a fact out: why.
REASONS = {
    "neighbor_with_edit": "too long for the model behind the edit's sentence",
    "divergence": SAMPLED,
}


@dataclass(frozen=True)
class LeftOut:
    """What one score was not measured on.

    Attributes:
        score: its name.
        count: how many.
        what: of which: "neighbors of 5 facts", "rows of 1200".
        reason: why.
    """

    score: str
    count: int
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.score}: {self.count} {self.what} left out: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def left_out(facts: Iterable[FactScores], drift_rows: tuple[int, int] = (0, 0)) -> tuple[LeftOut, ...]:
    """Everything that was left out.

    Args:
        facts: measured once each.
        drift_rows: how many rows of the generic text drift was measured on, and how many there are.
    """
    found = []
    some = list(facts)
    for score, reason in REASONS.items():
        counts = [one.left_out[score] for one in some if score in one.left_out]
        if counts:
            what = f"neighbor{'s' * (sum(counts) > 1)} of {len(counts)} fact{'s' * (len(counts) > 1)}"
            found.append(LeftOut(score, sum(counts), what, reason))
    measured, rows = drift_rows
    if measured < rows:
        found.append(LeftOut("drift", rows - measured, f"of {rows} rows of text", SAMPLED))
    return tuple(found)
