"""What values say of the tokens behind their triggers, and how memories and layers compose: as read one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import zoo
from passing import FAMILIES, documents, made, written
from torch import Tensor

from ffedit.inspector.values import CASES, compose, read_values, surest
from ffedit.model.hooks import capture


@pytest.mark.parametrize("family", FAMILIES)
def test_values_agree_as_the_plain_reading_says(family: str, tmp_path: Path) -> None:
    texts = documents(80)
    stack, state, store = made(family, written(tmp_path / "a.jsonl", texts), tmp_path / "out")
    editable = zoo.shared(family)
    all_values = []
    for layer, memory in enumerate(stack.memories.values()):
        values = read_values(stack, layer, state.triggers[layer], store)
        all_values.append(values)
        logits = torch.stack([read_alone(family, memory.value[:, i]) for i in range(memory.d_ff)])
        p = logits.softmax(-1)
        assert torch.equal(values.top, p.argmax(-1))
        assert torch.allclose(values.sure, p.max(-1).values, atol=1e-5)
        for at, key in enumerate(values.keys.tolist()):
            place = int(state.triggers[layer].positions[key, 0])
            row, end = list(store)[place // 64], place % 64
            assert values.next[at] == row[end + 1]
            better = [other for other in range(zoo.VOCAB) if logits[key, other] > logits[key, row[end + 1]]]
            assert values.rank[at] == len(better) + 1
            assert bool(values.agrees[at]) == (int(p[key].argmax()) == row[end + 1])
        assert Counter(values.permuted.tolist()) == Counter(values.next.tolist())
    best = surest(all_values, store, 10)
    every = sorted((float(v.sure[k]) for v in all_values for k in v.keys.tolist()), reverse=True)
    assert best.sure.tolist() == every[:10]
    assert bool((best.agrees <= best.any_agrees).all())
    assert len(editable.layers) == zoo.DEPTH


@torch.no_grad()
def read_alone(family: str, vector: Tensor) -> Tensor:
    """Final norm and unembedding by their names in the three families."""
    model = zoo.shared(family).model
    norm = {"gpt2": "transformer.ln_f", "llama": "model.norm", "opt": "model.decoder.final_layer_norm"}[family]
    logits: Tensor = model.lm_head(model.get_submodule(norm)(vector[None]))[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_composition_is_what_one_position_at_a_time_shows(family: str, tmp_path: Path) -> None:
    stack, state, store = made(family, written(tmp_path / "a.jsonl", documents(80)), tmp_path / "out")
    tops = [read_values(stack, layer, state.triggers[layer], store).top for layer in range(zoo.DEPTH)]
    found = compose(stack, state.sample.values, tops)
    model = zoo.shared(family).model
    for at, place in enumerate(state.sample.positions.tolist()):
        ids = torch.tensor([store.context(place).ids])
        modules = {layer: memory.module for layer, memory in enumerate(stack.memories.values())}
        with (
            torch.no_grad(),
            capture(modules, inputs=True) as keys,
            capture(modules) as outputs,
            capture(dict(enumerate(stack.layers))) as after,
        ):
            says = int(model(input_ids=ids).logits[0, -1].argmax())
        for layer, one in enumerate(found):
            m = keys[layer].reshape(ids.shape[1], -1)[-1]
            o, y = (some[layer].reshape(ids.shape[1], -1)[-1] for some in (outputs, after))
            r = y - o
            top = {name: int(read_alone(family, x).argmax()) for name, x in (("r", r), ("o", o), ("y", y))}
            case = {
                (True, True): "agreement",
                (True, False): "residual",
                (False, True): "feed-forward",
                (False, False): "compromise",
            }[top["y"] == top["r"], top["y"] == top["o"]]
            assert CASES[int(one.case[at])] == case
            assert bool(one.settled[at]) == (top["r"] == says)
            assert float(one.final[at]) == pytest.approx(float(read_alone(family, r).softmax(-1)[says]), abs=1e-5)
            active = [i for i in range(len(m)) if m[i] > 0]
            assert bool(one.zero[at]) == all(int(tops[layer][i]) != top["o"] for i in active)
            strengths = [abs(float(m[i])) * float(stack.memories[layer].value[:, i].norm()) for i in range(len(m))]
            effective = sum(s**2 for s in strengths) ** 2 / sum(s**4 for s in strengths)
            assert one.activity[at].tolist() == pytest.approx(
                [len(active), sum(s >= 0.01 * float(o.norm()) for s in strengths), effective], rel=1e-4
            )
