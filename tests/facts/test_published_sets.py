"""Published data sets, where they lie beside the checkout: they are read whole, and what they ask is kept."""

import json
from pathlib import Path

import pytest

from ffedit.facts.fact import Fact
from ffedit.facts.reading import sift_facts

SHARED = Path(__file__).parents[3] / "shared" / "data"


def published(name: str) -> Path:
    """Return the path of a set; skip the test where it is missing."""
    if not (path := SHARED / name).exists():
        pytest.skip(f"{path} is not here")
    return path


@pytest.mark.parametrize(
    ("name", "count", "probes"),
    [
        ("counterfact_easyedit_1000.json", 1000, "neighbors"),
        ("zsre_300.json", 300, "locality"),
        ("known_1000.json", 1208, None),  # 1,209 records, of which one asks the same as another; no new objects
    ],
)
def test_a_published_set_is_read_whole(name: str, count: int, probes: str | None) -> None:
    found = sift_facts(published(name), need_targets=probes is not None)
    assert len(found.facts) == count and not found.left_out
    assert all(fact.text[slice(*fact.span)] == fact.subject for fact in found.facts)
    if probes is not None:
        assert all(fact.target is not None and getattr(fact, probes) for fact in found.facts) and not found.notes
    assert [Fact.from_dict(json.loads(json.dumps(fact.to_dict()))) for fact in found.facts] == list(found.facts)


def test_the_set_of_same_subject_probes_is_read_but_for_what_contradicts_itself() -> None:
    sifted = sift_facts(published("same_subject_800.json"))
    assert (len(sifted.facts), len(sifted.left_out)) == (790, 10)  # five pairs give a prompt two targets
    counts = [sum(bool(getattr(f, n)) for f in sifted.facts) for n in ("same_subject", "portability", "neighbors")]
    assert counts == [183, 351, 334]
