"""Passes that only average are computed in bfloat16 where that is faster and agrees, and else as the model is."""

from pathlib import Path

import pytest
import torch
import zoo
from collecting import text

import ffedit
from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.recipe import recipe_of
from ffedit.inference import precision
from ffedit.inference.corpus import Corpus
from ffedit.model.editable import Editable

__all__ = ["text"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Editable:
    """A model in float32, as it was loaded."""
    editable = zoo.shared("llama")
    monkeypatch.setattr(editable, "auto_dtype", True)
    monkeypatch.setattr(editable, "averaging", None)
    return editable


def fast(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    monkeypatch.setattr(precision, "bfloat16_speed", lambda _: times)
    monkeypatch.setattr(zoo.shared("llama"), "averaging", None)


def moments(editable: Editable, text: Path) -> KeyMoments:
    ((_, found),) = ffedit.collect_stats(editable, [1], corpus=Corpus(text)).items()
    return found


def test_statistics_in_bfloat16_say_so_and_are_those_of_float32_up_to_rounding(
    model: Editable, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch, 1.0)
    exact = moments(model, text)
    fast(monkeypatch, 3.0)
    rounded = moments(model, text)
    assert "bfloat16" not in exact.source and rounded.source.endswith(", computed in bfloat16")
    off = (rounded.C - exact.C).norm() / exact.C.norm()
    assert 0 < off < 0.01  # 8 bits of each number; their mean has more
    assert exact.fingerprint == rounded.fingerprint  # either fits the model
    fast(monkeypatch, 1.0)
    assert torch.equal(moments(model, text).sum, exact.sum)  # each has its own place in the cache


def test_an_edit_from_rounded_statistics_writes_the_same_fact(
    model: Editable, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fact = ffedit.Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
    edits = []
    for times in (1.0, 3.0):
        fast(monkeypatch, times)
        edits.append(ffedit.edit(model, [fact], layers=[1], stats=Corpus(text)))
    exact, rounded = (ffedit.evaluate(model, [fact], edit).after for edit in edits)
    assert exact and rounded and exact.efficacy == rounded.efficacy
    assert [recipe_of(edit)["dtype"] for edit in edits] == ["float32", "auto"]  # as it was asked for
    changes = [next(iter(edit.updates.values())).dense for edit in edits]
    assert 0 < (changes[1] - changes[0]).norm() / changes[0].norm() < 0.1


def test_the_dtype_that_was_asked_for_is_kept_and_float32_is_where_keys_differ_in_bfloat16(
    model: Editable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch, 3.0)
    assert precision.averaging_dtype(model) == torch.bfloat16
    model.auto_dtype = False
    assert precision.averaging_dtype(model) == torch.float32
    model.auto_dtype = True
    fast(monkeypatch, 3.0)
    monkeypatch.setattr(precision, "AGREES", 1e-4)
    assert precision.averaging_dtype(model) == torch.float32


def test_a_model_is_compared_once_and_again_when_it_is_another(
    model: Editable, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Editable] = []
    monkeypatch.setattr(precision, "_differs", lambda editable: compared.append(editable) or 0.0)
    monkeypatch.setattr(precision, "fingerprint", lambda editable: editable.name)
    other = zoo.shared("gpt2")
    monkeypatch.setattr(other, "auto_dtype", True)
    for editable in (model, other, model, other):
        fast(monkeypatch, 3.0)
        monkeypatch.setattr(other, "averaging", None)
        assert precision.averaging_dtype(editable) == torch.bfloat16
    assert compared == [model, other]


def speed() -> float:
    """What a process that starts now takes the speed of bfloat16 to be."""
    precision.bfloat16_speed.cache_clear()
    try:
        return precision.bfloat16_speed(torch.device("cpu"))
    finally:
        precision.bfloat16_speed.cache_clear()


def test_the_speed_is_measured_once_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(precision, "least_seconds", lambda product: measured.append(product()) or 1.0)
    assert speed() == speed() == 1.0
    assert measured == [precision.SIDE] * 4  # both products, of few rows and of all, in the first call only


def test_a_processor_on_which_bfloat16_is_slow_is_recognised_by_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 100.0])
    monkeypatch.setattr(precision, "least_seconds", lambda product: next(seconds))
    assert speed() == 0.01


def test_a_device_that_refuses_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise RuntimeError("bfloat16 is not supported")

    monkeypatch.setattr(precision, "least_seconds", refuse)
    assert speed() == 0.0
