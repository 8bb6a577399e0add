"""The replication over a whole model, against one prefix, one value and one position at a time."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import atlas_inspect
import pytest
import torch
import zoo
from atlas_inspect import CASES, NOTHING, measure, read_text
from torch import Tensor

from ffedit import Corpus
from ffedit.inspector.rows import Positions
from ffedit.model.hooks import capture
from ffedit.progress import silent


@pytest.fixture
def positions(tmp_path: Path) -> Positions:
    rng, words = Random(0), zoo.WORDS[3:40]
    begin = (["the", "old"], ["in"])
    texts = [" ".join(rng.choice(begin) + rng.choices(words, k=rng.randint(1, 9))) for _ in range(60)]
    (path := tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Positions.of(zoo.shared("llama"), Corpus(path, 100_000))


@torch.no_grad()
def say(vectors: Tensor) -> Tensor:
    model = zoo.shared("llama").model
    return model.lm_head(model.model.norm(vectors)).argmax(-1)  # type: ignore[no-any-return]


def test_every_measure_is_what_a_plain_loop_finds(positions: Positions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas_inspect, "TOP", 7)
    monkeypatch.setattr(atlas_inspect, "TOKENS_PER_BATCH", 100)
    stack, total = zoo.shared("llama"), len(positions)
    prefixes = [positions.prefix(i) for i in range(total)]
    seen: list[list[Tensor]] = []  # m, o and y of each layer at each position, each run alone
    memories, blocks = dict(enumerate(m.module for m in stack.memories.values())), dict(enumerate(stack.layers))
    for prefix in prefixes:
        with torch.no_grad(), capture(memories, inputs=True) as m, capture(memories) as o, capture(blocks) as y:
            stack.model(input_ids=torch.tensor([prefix]))
        seen.append([x[layer].reshape(len(prefix), -1)[-1] for layer in memories for x in (m, o, y)])
    streams = [torch.stack(column) for column in zip(*seen, strict=True)]
    found, first = measure(stack, positions, silent), [prefixes.index(prefix) for prefix in prefixes]
    layers = read_text(stack, positions, torch.arange(total), silent)
    final = say(streams[-1])
    for number, layer in enumerate(layers):
        m, o, y = streams[3 * number : 3 * number + 3]
        values = say(stack.memories[number].value.T)
        once = m[sorted(set(first))]
        torch.testing.assert_close(layer.coefficients, once.topk(7, 0).values.T.clamp(min=0), rtol=1e-4, atol=1e-5)
        agreeing = []
        for key, ends in enumerate(layer.ends.tolist()):
            there = [end for end in ends if end != NOTHING]
            assert all(first[end] == end for end in there)
            assert m[there, key].tolist() == pytest.approx(layer.coefficients[key, : len(there)].tolist(), rel=1e-4)
            agreeing += [int(values[key]) == positions.next(there[0])] if there else []
        by_layer = {name: column[number] for name, column in found["by_layer"].items()}
        assert by_layer["agreement"] == pytest.approx(sum(agreeing) / len(agreeing))
        r, a, b = say(y - o), say(o), say(y)
        case = [
            {(True, True): "agreement", (True, False): "residual", (False, True): "feed-forward"}.get(
                (bool(z == x), bool(z == w)), "compromise"
            )
            for x, w, z in zip(r, a, b, strict=True)
        ]
        for name in CASES:
            assert by_layer[f"case_{name}"] == pytest.approx(case.count(name) / total)
        assert by_layer["settled"] == pytest.approx(float((r == final).double().mean()))
        assert by_layer["active_sign"] == pytest.approx(float((m > 0).double().mean()))
        none = [not any(int(values[i]) == int(a[at]) for i in (m[at] > 0).nonzero()[:, 0]) for at in range(total)]
        assert by_layer["zero_agreement"] == pytest.approx(sum(none) / total)
    assert found["shifted"] == pytest.approx(float((b != r).double().mean()))
    assert sum(found["surest"]["by_layer"]) == pytest.approx(1)
