"""`--require` compares scores, which are means of rounded numbers."""

from __future__ import annotations

import pytest

from ffedit.evaluator import Scores
from ffedit.safety.require import parse_requirements, unmet

RATES = {"efficacy": 0.7999999999999999, "specificity": 0.9499996, "paraphrase": 0.8000000000000002}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("efficacy>=0.8,paraphrase<=0.8", ""),
        ("efficacy<0.8", "efficacy<0.8 is not met: it is 0.8"),
        ("paraphrase>0.8", "paraphrase>0.8 is not met: it is 0.8"),
        ("specificity>=0.95", "specificity>=0.95 is not met: it is 0.9499996"),
        ("locality>0", "locality>0 cannot be measured: no prompts for it are given, or all are left out; no edit was"),
    ],
)
def test_scores_are_compared_up_to_rounding(text: str, told: str) -> None:
    error = unmet(parse_requirements(text), Scores(**RATES))
    assert (error is None) == (not told) and told in str(error or "")
