"""The metric of an edit: where keys are long its factor is kept, and each edit corrects it by its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from writing import FACT, quick, write_facts

import ffedit
from ffedit import Editable, Fact, KeyMoments
from ffedit.editor import metric as module, name_keys
from ffedit.files import cache
from ffedit.model.memory import Address

OTHER = Fact("Paris", "{} is in", target="Spain", previous="France")


@pytest.fixture
def editable(monkeypatch: pytest.MonkeyPatch) -> Editable:
    monkeypatch.setattr(name_keys, "names", lambda: ("Rome", "Paris", "Marie Curie", "Marie", "France", "Spain"))
    return zoo.trained("gpt2", True)


@pytest.fixture
def kept_factors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let keys of the tiny models count as long; the matrices that are factored."""
    factored: list[Tensor] = []
    factor = module.factor_
    monkeypatch.setattr(module, "factor_", lambda C: (factored.append(C), factor(C))[1])
    monkeypatch.setattr(module, "LONG", 1)
    monkeypatch.setattr(module, "FEW", 1)
    return factored


def written(editable: Editable, fact: Fact, method: str, stats: Mapping[Address, KeyMoments], **key: Any) -> Tensor:
    """Return what an edit adds, [d_model, d_ff]."""
    ((_, delta),) = write_facts(editable, [fact], method, [1], quick(context_weight=3.0, **key), stats).updates.items()
    return delta.dense


@pytest.mark.parametrize("method", ["rome", "emmet", "memit"])
def test_an_edit_by_a_kept_factor_is_the_edit_and_nothing_is_factored_anew(
    editable: Editable, method: str, request: pytest.FixtureRequest
) -> None:
    stats = ffedit.collect_stats(editable, [1])
    dense = [written(editable, fact, method, stats, names_weight=3.0) for fact in (FACT, OTHER)]
    factored = request.getfixturevalue("kept_factors")
    for fact, expected in zip((FACT, OTHER), dense, strict=True):  # the second is about one of the names
        corrected = written(editable, fact, method, stats, names_weight=3.0)
        torch.testing.assert_close(corrected, expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))
    assert len(factored) == 1
    other = written(editable, FACT, method, stats, names_weight=1.0)
    assert len(factored) == 2 and not torch.allclose(other, dense[0], rtol=1e-3), "another weight, another metric"


def test_a_method_without_a_metric_factors_none(editable: Editable, request: pytest.FixtureRequest) -> None:
    stats = ffedit.collect_stats(editable, [1])

    def division() -> list[float]:
        edit = write_facts(editable, [FACT, OTHER], "alphaedit", [1], quick(alphaedit_null_share=0.5), stats)
        found: list[float] = edit.provenance["division"]["1"]
        return found

    expected = division()
    factored = request.getfixturevalue("kept_factors")
    assert division() == expected and not factored
    assert not stats[Address(1)].factors and not [path for path in cache.entries() if path.parent.name == "factors"]


def test_a_later_run_takes_the_factor_from_the_cache_with_the_same_bits(
    editable: Editable, kept_factors: list[Tensor]
) -> None:
    def run(**key: Any) -> Tensor:
        return written(editable, FACT, "memit", ffedit.collect_stats(editable, [1]), **key)

    first = run(names_weight=3.0)
    assert torch.equal(run(names_weight=3.0), first) and len(kept_factors) == 1
    (file,) = [path for path in cache.entries() if path.parent.name == "factors"]
    file.write_bytes(file.read_bytes()[:-8])
    assert torch.equal(run(names_weight=3.0), first) and len(kept_factors) == 2, "a damaged one is computed anew"
    run(names_weight=1.0)
    assert len(kept_factors) == 3 and len([p for p in cache.entries() if p.parent.name == "factors"]) == 2


def test_a_factor_is_not_saved_with_the_moments(
    editable: Editable, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    stats = ffedit.collect_stats(editable, [1])
    stats[Address(1)].save(tmp_path / "before")
    monkeypatch.setattr(module, "LONG", 1)
    written(editable, FACT, "memit", stats, names_weight=3.0)
    assert len(stats[Address(1)].factors) == 1
    stats[Address(1)].save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
