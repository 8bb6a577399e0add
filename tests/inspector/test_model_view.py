"""One pass over a text, and what is made of it, against a plain independent implementation on three kinds of layers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import zoo
from passing import FAMILIES, TOP, documents, made, plain, told, written
from torch import Tensor

from ffedit import Corpus, EditError
from ffedit.inspector import memory_pass
from ffedit.inspector.keys import CHANCE, FEWEST, Endings, Frequencies, pair_hash, removals
from ffedit.inspector.memory_pass import Pass, Settings, collect, merge_passes, started
from ffedit.inspector.memory_view import inspect_memory
from ffedit.inspector.model_view import Removing, inspect_model
from ffedit.inspector.rows import CHUNK, NOTHING, Row, RowStore, rows_of
from ffedit.inspector.triggers import Sample, Triggers, prefix_hashes
from ffedit.inspector.values import CASES
from ffedit.inspector.views import MemoryIndex
from ffedit.model.hooks import capture
from ffedit.model.memory import Address


@pytest.mark.parametrize("family", FAMILIES)
def test_triggers_are_the_largest_coefficients_over_different_prefixes(family: str, tmp_path: Path) -> None:
    texts = documents(150)
    _, state, store = made(family, written(tmp_path / "a.jsonl", texts), tmp_path / "out")
    prefixes, keys, _ = plain(family, texts)
    assert len(prefixes) < sum(len(row) - 1 for row in store) == state.tokens  # some prefixes repeat
    for layer in range(zoo.DEPTH):
        expected = keys[:, layer].topk(TOP, dim=0).values.T.clamp(min=0)
        assert torch.allclose(state.triggers[layer].coefficients, expected, atol=1e-5)
        for key, triggers in enumerate(told(state, store, layer)):
            assert len({prefix for prefix, _ in triggers}) == len(triggers)
            for prefix, coefficient in triggers:
                expected = float(keys[prefixes.index(prefix), layer, key])
                assert coefficient == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_batches_and_order_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(150)
    _, one, store = made("gpt2", written(tmp_path / "a.jsonl", texts), tmp_path / "one")
    monkeypatch.setattr(memory_pass, "TOKENS_PER_BATCH", 60)
    _, other, others = made("gpt2", written(tmp_path / "b.jsonl", texts[::-1]), tmp_path / "other")
    assert_same(one, store, other, others)


def assert_same(one: Pass, store: RowStore, other: Pass, others: RowStore) -> None:
    """The same triggers, by prefix."""
    for layer in range(zoo.DEPTH):
        for mine, theirs in zip(told(one, store, layer), told(other, others, layer), strict=True):
            assert {prefix for prefix, _ in mine} == {prefix for prefix, _ in theirs}
            assert [m for _, m in mine] == pytest.approx([m for _, m in theirs], abs=1e-5)


def test_two_halves_merge_into_the_whole(tmp_path: Path) -> None:
    texts = documents(CHUNK + 90)
    whole = made("opt", written(tmp_path / "a.jsonl", texts), tmp_path / "whole")[1:]
    for name, half in (("x", texts[: len(texts) // 3]), ("y", texts[len(texts) // 3 :])):
        made("opt", written(tmp_path / f"{name}.jsonl", half), tmp_path / name)
    merged, store = merge_passes(zoo.shared("opt"), [tmp_path / "x", tmp_path / "y"], tmp_path / "merged")
    assert_same(merged, store, *whole)
    assert (merged.tokens, merged.rows) == (whole[0].tokens, whole[0].rows)
    assert torch.equal(merged.unigrams, whole[0].unigrams) and torch.equal(merged.pairs, whole[0].pairs)
    assert list(store) == list(whole[1])
    for layer in range(zoo.DEPTH):
        assert torch.equal(merged.triggers[layer].positions[:, 0], whole[0].triggers[layer].positions[:, 0])
    assert len(merged.sample.positions) == 40 and merged.sample.values["0/before"].shape == (40, zoo.WIDTH)


def test_an_interrupted_pass_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pass, "TOKENS_PER_BATCH", 500)
    corpus = written(tmp_path / "a.jsonl", documents(CHUNK + 200))
    stack, whole, _ = made("gpt2", corpus, tmp_path / "whole")
    (folder := tmp_path / "part").mkdir()
    calls: list[int] = []

    def interrupted(what: str, done: int, total: int) -> None:
        calls.append(done)
        if what == "inspecting" and len(calls) == 4:
            raise KeyboardInterrupt

    state = started(stack, whole.about)
    with pytest.raises(KeyboardInterrupt):
        collect(stack, rows_of(zoo.shared("gpt2"), corpus), corpus.tokens, state, folder, interrupted)
    again = memory_pass.resumed(stack, folder, whole.about)
    assert 0 < again.rows < whole.rows and not again.complete
    collect(stack, rows_of(zoo.shared("gpt2"), corpus), corpus.tokens, again, folder)
    assert again.complete
    for layer in range(zoo.DEPTH):
        for field in ("coefficients", "positions", "hashes"):
            assert torch.equal(getattr(again.triggers[layer], field), getattr(whole.triggers[layer], field))
    assert torch.equal(again.sample.positions, whole.sample.positions)
    assert all(torch.equal(again.sample.values[name], tensor) for name, tensor in whole.sample.values.items())
    for name in ("rows-000000", "rows-000001"):
        assert (folder / f"{name}.safetensors").read_bytes() == (tmp_path / f"whole/{name}.safetensors").read_bytes()


def test_another_text_is_not_gone_on_with(tmp_path: Path) -> None:
    stack, state, _ = made("gpt2", written(tmp_path / "a.jsonl", documents(30)), tmp_path / "out")
    other = written(tmp_path / "b.jsonl", documents(30, seed=1))
    with pytest.raises(EditError, match="begun with another text"):
        collect(stack, rows_of(zoo.shared("gpt2"), other), other.tokens, state, tmp_path / "out")
    with pytest.raises(EditError, match="settings"):
        memory_pass.resumed(stack, tmp_path / "out", state.about | {"settings": asdict(Settings(top=3))})


def test_equal_coefficients_are_ordered_by_their_prefixes_alone() -> None:
    hashes = prefix_hashes(torch.arange(60)[:, None])[:, 0]
    m = torch.tensor([1.0, 2.0, 3.0]).repeat(20)[:, None].expand(60, 2).contiguous()

    def kept(order: Tensor, batch: int) -> set[int]:
        triggers = Triggers.none(2, 25)
        for some in order.split(batch):
            triggers.update(m[some], some, hashes[some])
        assert torch.equal(triggers.positions[0], triggers.positions[1])
        assert triggers.coefficients[0].tolist() == [3.0] * 20 + [2.0] * 5
        return set(triggers.positions[0].tolist())

    orders: Iterator[Tensor] = (torch.randperm(60, generator=torch.Generator().manual_seed(i)) for i in range(4))
    assert len({frozenset(kept(order, batch)) for order in orders for batch in (1, 7, 60)}) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_silent_memories_are_no_candidates(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[Tensor] = []
    keep = Triggers._keep
    monkeypatch.setattr(Triggers, "_keep", lambda self, *given: (weighed.append(given[2]), keep(self, *given)))
    coefficients = torch.zeros(40, 3, dtype=dtype)
    coefficients[7, 1], coefficients[9, 2] = 1.0, 2.0**-24  # the smallest number of float16
    found = Triggers.none(3, TOP)
    found.update(coefficients, torch.arange(40), prefix_hashes(torch.arange(40)[:, None])[:, 0])
    assert [sorted(places[places != NOTHING].tolist()) for places in weighed] == [[7, 9]]
    assert found.positions[:, 0].tolist() == [NOTHING, 7, 9]


def test_a_text_on_which_the_model_overflows_is_refused(tmp_path: Path) -> None:
    editable, corpus = zoo.build("gpt2"), written(tmp_path / "a.jsonl", documents(30))
    with capture({"ids": editable.model.get_input_embeddings()}, inputs=True) as probed:
        editable.probe()
        token = next(i for row in rows_of(editable, corpus) for i in row[:-1] if i not in probed["ids"])
    with torch.no_grad():
        editable.model.get_input_embeddings().weight[token] = torch.nan  # type: ignore[index,operator]
    with pytest.raises(EditError, match="overflows on this text"):
        inspect_model(editable, corpus, tmp_path / "out", settings=Settings(top=TOP, positions=40))


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_a_token_is_running_without_it(family: str, tmp_path: Path) -> None:
    stack, state, store = made(family, written(tmp_path / "a.jsonl", documents(60)), tmp_path / "out")
    layer, keys = 1, [2, 9]
    prefixes = [[prefix for prefix, _ in told(state, store, layer)[key]] for key in keys]
    for key, rows, found in zip(
        keys, prefixes, removals(stack, stack.feed_forward[layer], keys, prefixes), strict=True
    ):
        long = [row for row in rows if len(row) > 1]
        assert found is not None and found.triggers == len(long)
        for name, changed in (("first", [row[1:] for row in long]), ("last", [row[:-1] for row in long])):
            changes = [
                alone(family, layer, key, b) / alone(family, layer, key, a) - 1
                for a, b in zip(long, changed, strict=True)
            ]
            assert getattr(found, name) == pytest.approx(sum(changes) / len(changes), abs=1e-5)


@torch.no_grad()
def alone(family: str, layer: int, key: int, ids: Row) -> float:
    with capture({0: zoo.shared(family).memories[layer].module}, inputs=True) as seen:
        zoo.shared(family).model(input_ids=torch.tensor([ids]))
    return float(seen[0].reshape(len(ids), -1)[-1, key])


def test_shallow_patterns_are_repeated_and_beyond_chance() -> None:
    unigrams = torch.zeros(20, dtype=torch.int64)
    unigrams[1], unigrams[2], unigrams[3:] = 900, 3, 5
    pairs = torch.zeros(2**20, dtype=torch.int64).index_add(
        0, pair_hash(torch.tensor([3]), torch.tensor([1])), torch.tensor([9])
    )
    pairs[0] += 1000
    last = torch.tensor([[1] * 6 + [2] * 3 + [4, 5], [1, 1, 1, 2, 2, 4, 5, 6, 7, 8, NOTHING]])
    previous = torch.tensor([[3, 3, 3, 3, 0, 0, 9, 9, 8, 1, 1], [NOTHING] * 11])
    found = Endings.of(previous, last, Frequencies(unigrams, pairs))

    def chance(count: int, mean: float) -> float:
        return 1 - sum(math.exp(-mean) * mean**i / math.factorial(i) for i in range(count))

    p = unigrams / unigrams.sum()
    for key in range(2):
        there = [token for token in last[key].tolist() if token != NOTHING]
        counts = Counter(there)
        by_hand = [
            token != NOTHING
            and counts[token] >= FEWEST
            and chance(counts[token], len(there) * float(p[token])) < CHANCE
            for token in last[key].tolist()
        ]
        assert found.by_last[key].tolist() == by_hand
    assert found.by_pair[0].tolist() == [True] * 4 + [False] * 7  # 1 is everywhere, but 3 1 is not
    assert found.covered[0] == pytest.approx(7 / 11) and not found.by_pair[1].any()
    one = found.most_frequent(0)
    assert one is not None and (one.last, one.pair, one.is_shallow) == (1, (3, 1), True)


def test_a_sample_is_the_smallest_ranks_whatever_the_batches() -> None:
    ranks = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    places = torch.arange(500)
    for batch in (500, 37):
        sample = Sample(20)
        for some, where in zip(ranks.split(batch), places.split(batch), strict=True):
            entering = sample.entering(some)
            sample.take(some[entering], where[entering], {"x": where[entering] * 2.0})
        assert sample.ranks.tolist() == list(range(20))
        assert torch.equal(sample.positions, ranks.argsort()[:20]) and torch.equal(
            sample.values["x"], sample.positions * 2.0
        )


def test_rows_of_running_text_share_the_token_at_the_cut(tmp_path: Path) -> None:
    editable = zoo.shared("gpt2")
    (path := tmp_path / "a.txt").write_text(text := " ".join(documents(120)))
    ids = editable.tokenizer(text)["input_ids"]
    rows = list(rows_of(editable, Corpus(path, 100_000)))
    assert [i for row in rows for i in row[:-1]] == ids[:-1] and [row[-1] for row in rows[:-1]] == [
        r[0] for r in rows[1:]
    ]
    assert {len(row) for row in rows[:-1]} == {65}
    cut = list(rows_of(editable, Corpus(path, 150)))
    assert [i for row in cut for i in row[:-1]] == ids[:150]
    assert sum(len(row) - 1 for row in rows_of(editable, Corpus(None, 200))) > 100  # what the model samples


def test_the_view_of_one_memory_finds_the_triggers_of_the_pass(tmp_path: Path) -> None:
    corpus = written(tmp_path / "a.jsonl", documents(60))
    _, state, store = made("llama", corpus, tmp_path / "out")
    slots = [MemoryIndex(Address(2), 5), MemoryIndex(Address(0), 47), MemoryIndex(Address(2), 1)]
    for slot in slots:
        found = inspect_memory(zoo.shared("llama"), slot, corpus=corpus, top=TOP)
        expected = told(state, store, slot.address.layer)[slot.index]
        assert [t.coefficient for t in found.triggers] == [pytest.approx(m) for _, m in expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_holds_every_measure_of_every_layer(family: str, tmp_path: Path) -> None:
    corpus = written(tmp_path / "a.jsonl", documents(80))
    report = inspect_model(
        zoo.shared(family), corpus, tmp_path / "out", settings=Settings(top=TOP, positions=40), removing=Removing(3, 2)
    )
    for measure in report.measures:
        assert len(measure.values) == zoo.DEPTH
        for value, low, high in zip(measure.values, measure.low, measure.high, strict=True):
            assert value is not None and low is not None and high is not None and low <= high
    cases = [report[f"case_{name.replace('-', '_')}"].values for name in CASES]
    assert [sum(filter(None, layer)) for layer in zip(*cases, strict=True)] == pytest.approx([1] * zoo.DEPTH)
    assert json.loads(json.dumps(report.to_dict()))["measures"][0]["paper"].startswith("3.2")
    again = inspect_model(
        zoo.shared(family), corpus, tmp_path / "out", settings=Settings(top=TOP, positions=40), removing=Removing(3, 2)
    )
    assert again == report
