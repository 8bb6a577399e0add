"""Helpers of the report scripts: the facts of a split, what they have in common, and reports written in one step."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ffedit
from ffedit.facts.formats import parse_record

HERE = Path(__file__).parents[1]
DATA_FOLDER = HERE / "data"
DATA = DATA_FOLDER / "atlas-counterfact.json"


def facts_of(split: str, limit: int | None = None, data: Path = DATA) -> list[ffedit.Fact]:
    """Return the facts of a split, in order; those of `tuning` share no subject with those of `reporting`."""
    records = [record for record in json.loads(data.read_text(encoding="utf-8")) if record["split"] == split]
    return [parse_record(record) for record in records[:limit]]


def sharing(facts: Sequence[ffedit.Fact]) -> str:
    """Describe what facts share, and so in what they are not independent: "40 facts of 34 subjects, ..."."""
    subjects, relations = {fact.subject for fact in facts}, Counter(fact.relation for fact in facts)
    objects = Counter((fact.relation, fact.previous) for fact in facts)
    return (
        f"{len(facts)} facts of {len(subjects)} subjects in {len(relations)} relations, at most "
        f"{max(relations.values(), default=0)} in one; "
        f"{sum(n for n in objects.values() if n > 1)} share their relation and old object with another"
    )


def keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a report as JSON in one step, so that the file is complete at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
