"""What the tests of `ffedit.bench` share: facts of the trained tiny models, short edits, and a report without times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zoo
from writing import CORPUS, quick

from ffedit import Fact
from ffedit.benchmark import BenchReport, bench
from ffedit.model.editable import Editable

# Strong enough that scores differ from method to method and from edit to edit.
NUMBERS = {"steps": 8, "step_size": 0.3, "contexts": 0, "ft_steps": 3}
CONFIG = quick(weight_decay=0.0, ft_rate=0.1, ft_bound=0.2, **NUMBERS)
METHODS = ("memit", "ft")
TIMES = ("seconds_per_fact", "hardware")


def facts(count: int = 5) -> list[Fact]:
    """Facts that the trained models know, each with a new object; the first two are of one subject."""
    known = list(zoo.KNOWN)
    made = [Fact(known[0][0], zoo.TEMPLATES[2], target="Egypt", previous=known[0][1], case_id="second")]
    for i, (subject, place) in enumerate(known):
        other, stays = known[(i + 1) % len(known)]
        made.append(
            Fact(
                subject,
                zoo.TEMPLATES[0],
                target="Rome" if place != "Rome" else "Spain",
                previous=place,
                paraphrases=[zoo.TEMPLATES[1]],
                neighbors=[{"prompt": zoo.TEMPLATES[1].format(other), "target": stays}],
                case_id=str(i),
            )
        )
    return [made[1], made[0], *made[2:]][:count]


def run(
    editable: Editable,
    out: Path,
    mode: str = "single",
    some: Sequence[Fact] | None = None,
    methods: Sequence[str] = METHODS,
    **how: Any,
) -> BenchReport:
    given: dict[str, Any] = {"layers": [1], "config": CONFIG, "stats": CORPUS, "full": False, **how}
    return bench(editable, facts() if some is None else some, methods, mode, out, **given)


def timeless(found: Any) -> Any:
    """A report without its times, and without where it was computed."""
    if isinstance(found, BenchReport):
        found = json.loads(json.dumps(found.to_dict()))
    if isinstance(found, dict):
        return {name: timeless(value) for name, value in found.items() if name not in TIMES}
    return [timeless(value) for value in found] if isinstance(found, list) else found


def same(found: Any, expected: Any, error: float = 1e-6) -> None:
    """Equal counts and rates, magnitudes within an error."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name in expected:
            same(found[name], expected[name], error)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other, error)
    else:
        assert found == (pytest.approx(expected, abs=error) if isinstance(expected, float) else expected)


def lines(out: Path) -> list[dict[str, Any]]:
    """What `results.jsonl` holds."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
