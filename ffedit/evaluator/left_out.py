"""What a score was not measured on, though it was given: counted, so that a mean over fewer prompts tells so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffedit.evaluator.scores import FactScores

SAMPLED = "outside the sample whose distributions are kept"
# What a score is measured on, one and several.
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
# Why prompts of a fact are left out of a score, by what stands behind its name in `FactScores.left_out`.
REASONS = {
    "edited": "what they ask for is edited as well",
    "unsaid": "no object is named, and the model says none before the edit",
    "one": "both objects are one, so there is nothing to compare",
    "alone": "they need edits that are not made together with this one",
}
OF_SCORE = {"neighbor_with_edit": "too long for the model behind the edit's sentence", "divergence": SAMPLED}


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
