"""Analyses of one key, against plain counting and against the model run without a token."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
import zoo
from key_analyses import CHANCE, FEWEST, Frequencies, Shallow, removal

from ffedit import Corpus
from ffedit.inspector.rows import Positions, Row, rows_of
from ffedit.model.hooks import capture

# ReLU, GELU, and a SwiGLU gate.
FAMILIES = ("opt", "gpt2", "llama")


def documents(count: int) -> list[str]:
    """Short texts, many of which begin alike."""
    rng, words = Random(0), zoo.WORDS[3:40]
    return [
        " ".join(
            [*rng.choice((("the", "old"), ("in",), ("Paris", "of", "a"))), *rng.choices(words, k=rng.randint(0, 9))]
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_a_token_is_running_without_it(family: str, tmp_path: Path) -> None:
    stack, layer = zoo.shared(family), 1
    (path := tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(60)))
    positions = Positions.of(stack, Corpus(path, 100_000))
    rows = list(dict.fromkeys(positions.prefix(i) for i in range(0, len(positions), 40)))
    for key in (2, 9):
        fires = [row for row in rows if alone(family, layer, key, row) > 0]
        found, long = removal(stack, stack.feed_forward[layer], key, fires), [row for row in fires if len(row) > 1]
        assert found is not None and found.triggers == len(long) > 0
        for name, changed in (("first", [row[1:] for row in long]), ("last", [row[:-1] for row in long])):
            changes = [
                alone(family, layer, key, b) / alone(family, layer, key, a) - 1
                for a, b in zip(long, changed, strict=True)
            ]
            assert getattr(found, name) == pytest.approx(sum(changes) / len(changes), rel=1e-3, abs=1e-5)
    assert removal(stack, stack.feed_forward[layer], 2, [rows[0][:1]]) is None


@torch.no_grad()
def alone(family: str, layer: int, key: int, ids: Row) -> float:
    with capture({0: zoo.shared(family).memories[layer].module}, inputs=True) as seen:
        zoo.shared(family).model(input_ids=torch.tensor([ids]))
    return float(seen[0].reshape(len(ids), -1)[-1, key])


def test_shallow_patterns_are_repeated_and_beyond_chance() -> None:
    text = [[1] * 900, [2] * 3, *([token] * 5 for token in range(3, 20)), *([3, 1] for _ in range(2))]
    tokens = Counter(token for row in text for token in row)
    frequencies = Frequencies.of(text)
    pairs = [(3, 1)] * 4 + [(0, 1)] * 2 + [(9, 2)] * 2 + [(8, 2), (1, 4), (1, 5)]
    triggers = [(7, *pair) for pair in pairs]
    found = Shallow.of(triggers, frequencies)

    def beyond_chance(count: int, p: float) -> bool:
        mean = len(pairs) * p
        below = sum(math.exp(-mean) * mean**i / math.factorial(i) for i in range(count))
        return count >= FEWEST and 1 - below < CHANCE

    times, both = Counter(last for _, last in pairs), Counter(pairs)
    assert frequencies.share((2,)) == tokens[2] / tokens.total()
    assert frequencies.share((3, 1)) == 2 / sum(len(row) - 1 for row in text)
    by_hand = [
        beyond_chance(times[last], frequencies.share((last,))) or beyond_chance(both[pair], frequencies.share(pair))
        for pair in pairs
        for last in pair[1:]
    ]
    assert by_hand == [True] * 4 + [False] * 2 + [True] * 3 + [False] * 2  # 1 is everywhere, but 3 1 is not
    assert found is not None and found.covered == pytest.approx(7 / 11)
    assert found.is_shallow
    single = Shallow.of([(4,)] * 3, frequencies)
    assert single is not None and single.covered == 1
    assert Shallow.of([], frequencies) is None


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
