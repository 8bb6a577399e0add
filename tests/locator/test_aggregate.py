"""Many facts at once: batches change nothing, interrupted runs go on, averages by role are what a hand computes."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from tracing import made

from ffedit.errors import FactError, ModelError
from ffedit.facts.fact import Fact
from ffedit.locator import Trace, TraceSet, aggregate, cases, locate, locate_all, restore, trace
from ffedit.locator.result import ROLES, by_role

FACT = Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
FACTS = [
    FACT,
    Fact("Anna Karenina", "Leo Tolstoy wrote {}", target="Rome", previous="in"),
    Fact("Leo Tolstoy", "{} wrote", target="the piano", previous="the big old Anna Karenina"),
    Fact("Rome", "Rome and the old Rome is in", target="the old Spain", previous="Italy", occurrence=1),
    Fact("Marie Curie", "the city of {} is", target="Spain"),
]


def equal(first: Trace, second: Trace, atol: float = 0.0) -> None:
    one, two = first.to_dict(), second.to_dict()
    for name in ("effects", "errors", "alone", "clean", "corrupted"):
        np.testing.assert_allclose(one.pop(name), two.pop(name), rtol=0, atol=atol)
    assert one == two


# Batches and memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "metric"), [("gpt2", "log_probability"), ("llama", "logit_difference")])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (10**9,) * 4, (1, 40, 2**14, 500), (128, 512, 3000, 10**9)])
def test_how_facts_are_cut_into_batches_changes_nothing(
    family: str, metric: Any, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [locate(zoo.shared(family), fact, samples=2, metric=metric, sever="attention") for fact in FACTS[:4]]
    names = ("LEAST", "FEWEST", "LEAST_NUMBERS", "UNEMBEDDED")
    for name, size in zip(names, sizes, strict=True):
        monkeypatch.setattr(cases if name == "LEAST_NUMBERS" else restore, name, size)
    together = locate_all(zoo.shared(family), FACTS[:4], samples=2, metric=metric, sever="attention")
    for one, other in zip(alone, together.traces, strict=True):
        equal(one, other, atol=5e-5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("not enough memory: you tried 9 EB")])
def test_a_group_that_does_not_fit_is_halved(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, resume, sizes = locate_all(zoo.shared("gpt2"), FACTS, samples=2), restore.replay.resume, []

    def tight(editable: Any, recording: Any, layer: int, states: Any, *rest: Any) -> Any:
        sizes.append(len(states))
        if len(states) > 4:
            raise error
        return resume(editable, recording, layer, states, *rest)

    monkeypatch.setattr(restore.replay, "resume", tight)
    for one, other in zip(expected.traces, locate_all(zoo.shared("gpt2"), FACTS, samples=2).traces, strict=True):
        equal(one, other, atol=1e-6)
    assert max(sizes) > 8 and min(sizes) <= 4
    with pytest.raises(ModelError, match="fewer samples"):
        locate_all(zoo.shared("gpt2"), FACTS, samples=5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in zoo.shared("gpt2").model.modules())


def test_a_failed_run_is_let_go_before_its_halves_run(monkeypatch: pytest.MonkeyPatch) -> None:
    resume, failed = restore.replay.resume, []

    def tight(editable: Any, recording: Any, layer: int, states: Any, *rest: Any) -> Any:
        if not failed:
            failed.append(weakref.ref(states))
            raise torch.OutOfMemoryError("CUDA")
        gc.collect()
        assert failed[0]() is None
        return resume(editable, recording, layer, states, *rest)

    monkeypatch.setattr(restore.replay, "resume", tight)
    locate(zoo.shared("gpt2"), FACT, samples=2)


# The journal --------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, stop: int = 99) -> list[int]:
    """Count the facts that are traced, each in a batch of its own; Ctrl-C comes in batch `stop`."""
    seen: list[int] = []
    run_batch = cases.run_batch

    def run(editable: Any, some: Any, *rest: Any) -> Any:
        if len(seen) == stop:
            raise KeyboardInterrupt
        seen.append(len(some))
        return run_batch(editable, some, *rest)

    monkeypatch.setattr(cases, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(trace, "run_batch", run)
    return seen


def test_an_interrupted_run_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    whole = locate_all(zoo.shared("gpt2"), FACTS, samples=2)
    with monkeypatch.context() as patch:
        seen = counted(patch, stop=2)
        with pytest.raises(KeyboardInterrupt):
            locate_all(zoo.shared("gpt2"), FACTS, samples=2, resume=True)
        assert seen == [1, 1]
    (journal,) = cache_folder.glob("traces/*.jsonl")
    lines = journal.read_text().splitlines()
    journal.write_text(journal.read_text() + lines[-1][: len(lines[-1]) // 2])  # torn by a kill
    seen = counted(monkeypatch)
    for missing in (3, 0):
        again = locate_all(zoo.shared("gpt2"), FACTS, samples=2, resume=True)
        assert len(seen) == missing
        seen.clear()
        for one, other in zip(whole.traces, again.traces, strict=True):
            equal(one, other, atol=1e-6)
    two = np.int64(2)  # which JSON cannot say
    assert locate(zoo.shared("gpt2"), FACT, samples=two, resume=True).answer == "Paris" and not seen
    assert locate(zoo.shared("gpt2"), FACT, window=two, resume=True).window == 2


def test_a_torn_journal_gives_the_same_bits(cache_folder: Path) -> None:
    whole = locate_all(zoo.shared("gpt2"), FACTS, samples=2, resume=True)
    (journal,) = cache_folder.glob("traces/*.jsonl")
    text = journal.read_bytes()
    for kept in range(text.index(b"\n") + 1, len(text), len(text) // 7):
        journal.write_bytes(text[:kept])
        again = locate_all(zoo.shared("gpt2"), FACTS, samples=2, resume=True)
        assert [trace.to_dict() for trace in again.traces] == [trace.to_dict() for trace in whole.traces]
        assert journal.read_bytes() == text


def test_other_settings_models_and_facts_share_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, editable = counted(monkeypatch), zoo.build("gpt2")
    changes: list[dict[str, Any]] = [
        *({}, {"seed": 1}, {"samples": 3}, {"window": 1}, {"sever": "attention"}, {"metric": "log_probability"}),
        *({"corruption": "uniform"}, {"corruption": "gaussian:2"}, {"kind": "state"}, {"tokens": "subject_and_last"}),
    ]
    for change in changes:
        for expected in (1, 0):
            locate(editable, FACT, **{"samples": 2, "resume": True, **change})
            assert len(seen) == expected, change
            seen.clear()
    locate(editable, Fact(FACT.subject, FACT.prompt, "Rome", "Berlin"), samples=2, resume=True)
    locate(zoo.build("gpt2", bos=True), FACT, samples=2, resume=True)
    locate(zoo.build("gpt2", seed=1), FACT, samples=2, resume=True)
    assert len(seen) == 3
    with torch.no_grad():
        editable.memories[1].weight[0, 0] += 1
    locate(editable, FACT, samples=2, resume=True)
    locate(editable, FACT, samples=2)
    locate(editable, FACT, samples=2)
    assert len(seen) == 6, "without resume nothing is taken from the journal"


def test_replacements_depend_on_the_other_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    for some, expected in ((FACTS[:2], 2), (FACTS[:2], 0), ([*FACTS[:2], FACTS[4]], 3)):
        locate_all(zoo.shared("gpt2"), some, corruption="replacement", samples=1, resume=True)
        assert len(seen) == expected
        seen.clear()


@pytest.mark.parametrize("options", [{}, {"corruption": "replacement"}, {"samples": 1, "sever": "attention"}])
def test_a_trace_is_read_back_exactly(options: dict[str, Any]) -> None:
    for found in locate_all(zoo.shared("gpt2"), FACTS[:2], **options).traces:
        read = Trace.from_dict(json.loads(json.dumps(found.to_dict())))
        equal(found, read)
        assert read.effects.dtype == np.float64 and read.layer == found.layer and read.total == found.total


# Averages -----------------------------------------------------------------------------------------

# Two layers; the subject is tokens 1 to 3 of 7, token 1 of 3, and the last two of three.
LONG = made([[0, 1, 2, 4, 5, 7, 6], [0, 0, 0, 1, 0, 0, 3]], (1, 4))
LONGER = made([[0, 1, 2, 4, 6, 5, 7, 9, 8], [0] * 9], (1, 5), clean=0.7)
SHORT = made([[0, 3, 2], [0, 5, 1]], (1, 2), corrupted=0.5)
ENDING = made([[0, 8, 1], [0, 4, 0]], (1, 3))


def test_averages_by_role_are_computed_by_hand() -> None:
    found = aggregate(TraceSet((LONG, LONGER, SHORT, ENDING)))
    assert found.roles == ROLES and found.counts == (3, 2, 4, 2, 2, 3) and found.facts == 4
    expected = [
        *([(1 + 1 + 8) / 3, 4 / 3], [(2 + 3) / 2, 0], [(4 + 6 + 3 + 1) / 4, (1 + 5) / 4]),
        *([(5 + 5) / 2, 0], [(7 + 8) / 2, 0], [(6 + 8 + 2) / 3, (3 + 1) / 3]),
    ]
    np.testing.assert_allclose(found.effects, expected)
    assert (found.clean, found.corrupted) == pytest.approx(((3 * 0.9 + 0.7) / 4, (3 * 0.1 + 0.5) / 4))
    two = TraceSet((SHORT, ENDING))
    assert two.total == pytest.approx((0.4 + 0.8) / 2)
    np.testing.assert_allclose(two.at_subject, [(3 + 1) / 2, (5 + 0) / 2])
    assert found.total.mean == pytest.approx((0.8 + 0.6 + 0.4 + 0.8) / 4) and found.layer == 0
    assert aggregate(TraceSet((SHORT, SHORT))).roles == ("last subject", "last token"), "one token is the last one"
    assert aggregate(TraceSet((ENDING,))).roles == ("first subject", "last subject"), "nothing follows the subject"
    assert np.isnan(by_role(ENDING)[2:]).sum() == 2 * 3


def test_facts_that_the_model_does_not_know_are_set_apart() -> None:
    unknown = made([[0, 99, 99], [0, 99, 99]], (1, 2), known=False, prompt="t0 t1 t2")
    found, without = aggregate(TraceSet((SHORT, unknown, LONG))), aggregate(TraceSet((SHORT, LONG)))
    assert found.unknown == ("t0 t1 t2",) and found.facts == 2 and without.unknown == ()
    assert {**found.to_dict(), "unknown": ()} == without.to_dict()
    with pytest.raises(FactError, match="for none of 2 facts"):
        aggregate(TraceSet((unknown, unknown)))


def test_intervals_hold_the_mean_shrink_with_more_facts_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 1.0, (400, 2, 3))
    traces = [made(values, (1, 2), clean=1 + float(values.mean())) for values in drawn]
    few, many = (aggregate(TraceSet(tuple(traces[:count]))) for count in (20, 400))
    for found, count in ((few, 20), (many, 400)):
        assert (found.low < found.effects).all() and (found.effects < found.high).all()
        assert found.total.low < found.total.mean < found.total.high
        spread = drawn[:count, :, 1:].std(0, ddof=1).T / math.sqrt(count)
        np.testing.assert_allclose(found.high - found.low, 2 * 1.96 * spread, rtol=0.15)
    assert aggregate(TraceSet(tuple(traces[:20]))).to_dict() == few.to_dict()
    monkeypatch.setattr("ffedit.locator.result.SEED", 1)
    other = aggregate(TraceSet(tuple(traces[:20])))
    assert not np.array_equal(other.low, few.low) and np.array_equal(other.effects, few.effects)


@pytest.mark.parametrize("numbers", [LONG, aggregate(TraceSet((LONG, SHORT)))], ids=["trace", "average"])
def test_saved_numbers_name_their_axes(numbers: Any, tmp_path: Path) -> None:
    numbers.save(tmp_path / "x.npz")
    saved = np.load(tmp_path / "x.npz", allow_pickle=False)
    assert saved["axes"].tolist() == ["layer" if numbers is LONG else "role", "token" if numbers is LONG else "layer"]
    assert set(saved) == {"axes", *(name for name, value in numbers.to_dict().items() if value is not None)}
    assert np.array_equal(saved["effects"], numbers.effects) and float(saved["clean"]) == numbers.clean
