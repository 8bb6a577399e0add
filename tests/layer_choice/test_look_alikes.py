"""Which names the leak of a site is measured at."""

from __future__ import annotations

import pytest
import torch

from ffedit import Fact
from ffedit.inference.names import alike, names
from ffedit.layer_choice import look_alikes as module
from ffedit.layer_choice.look_alikes import look_alikes, measured_names, neighbor_subjects

TOWERS = ("Tokyo Tower", "CN Tower", "Tower", "Eiffel", "Rome", "Paris", "Marie Curie")


def test_half_of_the_names_are_measured_always_the_same() -> None:
    measured = measured_names()
    assert 0.45 < len(measured) / len(names()) < 0.55 and set(measured) < set(names())
    assert len(set(measured)) == len(measured) and measured == measured_names.__wrapped__()


def test_the_subjects_of_neighbors_stand_where_the_facts_own_does() -> None:
    fact = Fact(
        "Eiffel Tower",
        "{} is located in the city of",
        paraphrases=["Visitors who want to see Eiffel Tower travel to", "{}: in"],
        neighbors=[
            "Victory Column is located in the city of",
            "Visitors who want to see Sacre Coeur travel to",
            "Victory Column: in",
            "Tourists in Rome and Buenos Aires see",  # of the names that ship, the longest
            "The tower of nobody stands in",
            {"prompt": "Eiffel Tower in Las Vegas is located in the city of", "target": "Las Vegas"},
        ],
    )
    assert neighbor_subjects(fact) == ["Victory Column", "Sacre Coeur", "Buenos Aires"]
    assert neighbor_subjects(Fact("Rome", "{} is in")) == []


@pytest.mark.parametrize(("subject", "first"), [("Eiffel Tower", ["CN Tower", "Tokyo Tower"]), ("Berlin", ["Rome"])])
def test_look_alikes_share_the_last_word_and_then_the_direction_of_the_key(
    monkeypatch: pytest.MonkeyPatch, subject: str, first: list[str]
) -> None:
    monkeypatch.setattr(module, "measured_names", lambda: TOWERS[:-1])
    angles = torch.tensor([0.9, 0.5, 0.0, 0.0, 0.2, 0.3, 0.0])
    keys = torch.stack([angles.cos(), angles.sin()], 1).bfloat16()
    found = look_alikes(subject, TOWERS, keys, torch.tensor([1.0, 0.0], dtype=torch.float64), 10)
    if len(first) > 1:
        assert found == [*first, "Rome", "Paris"], (
            "no name that is words of the subject's, and none that is not measured"
        )
    else:
        assert set(found[:2]) == {"Tower", "Eiffel"} and found[2:] == ["Rome", "Paris", "CN Tower", "Tokyo Tower"]
    assert look_alikes(subject, TOWERS, keys, torch.tensor([1.0, 0.0]), 2) == found[:2]
    assert not any(alike(name, subject) for name in found)
