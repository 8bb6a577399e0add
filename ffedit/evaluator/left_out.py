"""Counts of prompts and texts that were given but that a score was not measured on, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffedit.evaluator.scores import FactScores

SAMPLED = "outside the sample whose distributions are kept"
# The items that a score is measured on, in singular and plural.
MEASURED_ON = {
    "efficacy": ("prompt", "prompts"),
    "paraphrase": ("paraphrase", "paraphrases"),
    "specificity": ("neighbor", "neighbors"),
    "same_subject": ("same-subject prompt", "same-subject prompts"),
    "portability": ("question", "questions"),
    "locality": ("unrelated question", "unrelated questions"),
    "neighbor_with_edit": ("neighbor", "neighbors"),
    "divergence": ("neighbor", "neighbors"),
}
# Reasons for leaving prompts of a fact out of a score, by the suffix of its name in `FactScores.left_out`.
REASONS = {
    "edited": "what they ask for is edited as well",
    "unsaid": "no object is named, and the model says none before the edit",
    "one": "both objects are one, so there is nothing to compare",
    "alone": "they need edits that are not made together with this one",
}
OF_SCORE = {"neighbor_with_edit": "too long for the model behind the edit's sentence", "divergence": SAMPLED}


@dataclass(frozen=True)
class LeftOut:
    """Items that one score was not measured on.

    Attributes:
        score: name of the score.
        count: number of items left out.
        what: the items: "neighbors of 5 facts", "of 1200 rows of text".
        reason: why they were left out.
    """

    score: str
    count: int
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.score}: {self.count} {self.what} left out: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)


def left_out(facts: Iterable[FactScores], drift_rows: tuple[int, int] = (0, 0)) -> tuple[LeftOut, ...]:
    """Return all that was left out, by score and reason.

    Args:
        facts: scores of the facts, each once.
        drift_rows: number of rows of the generic text that drift was measured on, and number of all rows.
    """
    found = []
    some = list(facts)
    for score, nouns in MEASURED_ON.items():
        whys = {f"{score}/{why}": reason for why, reason in REASONS.items()}
        for name, reason in {**whys, score: OF_SCORE.get(score, "")}.items():
            counts = [one.left_out[name] for one in some if name in one.left_out]
            if counts:
                what = f"{nouns[sum(counts) > 1]} of {len(counts)} fact{'s' * (len(counts) > 1)}"
                found.append(LeftOut(score, sum(counts), what, reason))
    measured, rows = drift_rows
    if measured < rows:
        found.append(LeftOut("drift", rows - measured, f"of {rows} rows of text", SAMPLED))
    return tuple(found)
