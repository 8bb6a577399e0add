"""Encoders, and both halves of encoder–decoders, looked into: against one text at a time with hooks, and by command."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import halves
import pytest
import torch
import zoo
from shown import shown
from torch import Tensor, nn

import ffedit
from ffedit import Corpus
from ffedit.display.terminal.memories import memory_view
from ffedit.inspector.memory_pass import Settings, collect, started
from ffedit.inspector.model_view import Removing
from ffedit.inspector.rows import NOTHING, rows_of
from ffedit.inspector.values import CASES, compose

STACKS = [
    ("bert", "encoder"),
    *((family, half) for family in ("t5", "bart", "marian") for half in ("encoder", "decoder")),
]
START = {"t5": 0, "bart": 2, "marian": 2}
TOP = 6
Spot = tuple[tuple[int, ...], int]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (path := tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in halves.texts()))
    return Corpus(path)


def parts(family: str, half: str, model: Any) -> Iterator[tuple[nn.Module, nn.Module | None, nn.Module]]:
    """Of each layer: the value matrix, the norm that gets the sum where there is one, and the block."""
    if family == "bert":
        for block in model.bert.encoder.layer:
            yield block.output.dense, block.output.LayerNorm, block
    elif family == "t5":
        for block in model.get_submodule(half).block:
            yield block.layer[-1].DenseReluDense.wo, None, block
    else:
        for block in model.model.get_submodule(half).layers:
            yield block.fc2, block.final_layer_norm, block


def read(family: str, half: str, model: Any, states: Tensor) -> Tensor:
    if family == "bert":
        logits = model.cls.predictions(states)
    elif family == "t5":
        logits = model.lm_head(model.get_submodule(half).final_layer_norm(states) * zoo.WIDTH**-0.5)
    else:
        logits = states @ model.model.shared.weight.T + model.final_logits_bias[0]
    return logits


@functools.cache
@torch.no_grad()
def plain(family: str, half: str) -> dict[Spot, list[dict[str, Tensor]]]:
    """Of every position of every text, alone and unpadded: m, o, r and y of each layer."""
    model, found = halves.stack_of(family, half).model, dict[Spot, list[dict[str, Tensor]]]()
    for text in halves.texts():
        ids = [0, *halves.tokenizer()(text, add_special_tokens=False)["input_ids"], 1]
        row, seen, handles = ids, list[dict[str, Tensor]](), []

        def first(tensor: Any) -> Tensor:
            return tensor[0] if isinstance(tensor, tuple) else tensor

        for value, norm, block in parts(family, half, model):
            seen.append(layer := {})

            def keep(module: Any, args: Any, out: Any, layer: Any = layer) -> None:
                layer.update(m=args[0][0], o=out[0])

            def total(module: Any, args: Any, layer: Any = layer) -> None:
                layer["total"] = args[0][0]

            def after(module: Any, args: Any, out: Any, layer: Any = layer) -> None:
                layer["y"] = first(out)[0]

            handles += [value.register_forward_hook(keep), block.register_forward_hook(after)]
            handles += [norm.register_forward_pre_hook(total)] if norm is not None else []
        if half == "decoder":
            row = [START[family], *ids]
            model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([row[:-1]]))
        elif family == "bert":
            model(input_ids=torch.tensor([ids]))
        else:
            model.get_encoder()(input_ids=torch.tensor([ids]))
        for handle in handles:
            handle.remove()
        for at in range(len(ids)):
            layers = [
                {**{k: v[at] for k, v in one.items()}, "r": one.get("total", one["y"])[at] - one["o"][at]}
                for one in seen
            ]
            found.setdefault((tuple(row), at), layers)
    return found


def follows(spot: Spot, half: str) -> int | None:
    return spot[0][spot[1] + 1] if half == "decoder" else None


@pytest.mark.parametrize(("family", "half"), STACKS)
def test_one_memory(family: str, half: str, corpus: Corpus) -> None:
    stack, all_of_it = halves.stack_of(family, half), plain(family, half)
    largest = torch.stack([layers[1]["m"] for layers in all_of_it.values()]).topk(TOP + 1, 0).values
    # Spots of equal strength may come in either order: a T5 decoder starts with the token that the text then has again.
    apart = (largest[-1] > 0) & (largest[:-1] - largest[1:] > 1e-4 * largest[0]).all(0)
    for index in apart.nonzero()[::9, 0].tolist()[:3]:
        view = ffedit.inspect_memory(stack, f"1.{index}", corpus=corpus, top=TOP)
        m = {spot: float(layers[1]["m"][index]) for spot, layers in all_of_it.items()}
        best = sorted((spot for spot in m if m[spot] > 0), key=lambda spot: -m[spot])[:TOP]
        strengths = [m[spot] for spot in best]
        assert [one.coefficient for one in view.triggers] == pytest.approx(strengths, rel=1e-5, abs=1e-5)
        value = stack.memories[1].value[:, index]
        p = read(family, half, stack.model, value[None])[0].detach().softmax(-1)
        assert [one.id for one in view.value.top] == p.topk(TOP).indices.tolist()
        assert view.value.max_probability == pytest.approx(float(p.max()), abs=1e-5)
        for one, (ids, at) in zip(view.triggers, best, strict=True):
            words = [halves.tokenizer().decode([i]) for i in ids if i > 1 or i == ids[at]]
            assert one.prefix.last.strip() == halves.tokenizer().decode([ids[at]])
            assert set(f"{one.prefix.text} {one.prefix.after}".split()) <= set(words)
            assert len(one.prefix.text.split()) == sum(i not in halves.tokenizer().all_special_ids for i in ids[:at])
            if half == "decoder":
                assert one.next is not None and one.next.id == ids[at + 1]
                assert one.rank == int((p > p[ids[at + 1]]).sum()) + 1
            else:
                assert one.next is None and one.rank is None
        assert view.removal is None and view.note is not None and "removal" in view.note and view.stack == half
        agrees = [follows(spot, half) == int(p.argmax()) for spot in best]
        expected = (agrees[0], sum(agrees) / len(agrees)) if half == "decoder" else (None, None)
        assert (view.agrees, view.agreeing) == expected and (view.chance is None) == (half == "encoder")
        last = [ids[at] for ids, at in best]
        assert view.shallow is not None and view.shallow.last_share == max(map(last.count, last)) / len(last)
        assert view.tokens == sum(len(text.split()) + 2 for text in halves.texts())
    text = shown(memory_view(view))
    assert f"«{view.triggers[0].prefix.last.strip()}»" in text and f"of the {half}" in text
    assert ("place" in text) == (half == "decoder")
    json.dumps(view.to_dict())


@pytest.mark.parametrize(("family", "half"), STACKS)
def test_all_triggers_and_the_composition(family: str, half: str, corpus: Corpus, tmp_path: Path) -> None:
    stack, all_of_it = halves.stack_of(family, half), plain(family, half)
    about = {"settings": asdict(Settings(top=TOP, positions=40))}
    state = started(stack, about)
    store = collect(stack, rows_of(stack, corpus), corpus.tokens, state, tmp_path)
    spots = list(all_of_it)
    for layer, memory in enumerate(stack.memories.values()):
        m = torch.stack([layers[layer]["m"] for layers in all_of_it.values()])
        kept = state.triggers[layer]
        torch.testing.assert_close(kept.coefficients, m.topk(TOP, 0).values.T.clamp(min=0), rtol=1e-5, atol=1e-5)
        for key in range(0, memory.d_ff, 5):
            for place, coefficient in zip(kept.positions[key].tolist(), kept.coefficients[key].tolist(), strict=True):
                if place != NOTHING:
                    expected = float(m[spots.index(tuple(store.context(place))), key])
                    assert coefficient == pytest.approx(expected, rel=1e-5, abs=1e-5)
    tops = [read(family, half, stack.model, memory.value.T).argmax(-1) for memory in stack.memories.values()]
    composed = compose(stack, state.sample.values, tops)
    for at, place in enumerate(state.sample.positions.tolist()):
        layers = all_of_it[tuple(store.context(place))]  # type: ignore[index]
        says = int(read(family, half, stack.model, layers[-1]["y"][None]).argmax())
        for own, one, seen in zip(tops, composed, layers, strict=True):
            r, o, y = (read(family, half, stack.model, seen[name][None])[0] for name in "roy")
            assert (int(one.residual[at]), int(one.added[at]), int(one.output[at])) == tuple(
                int(x.argmax()) for x in (r, o, y)
            )
            assert float(one.final[at]) == pytest.approx(float(r.softmax(-1)[says].detach()), abs=1e-5)
            active = (seen["m"] > 0).nonzero()[:, 0]
            assert bool(one.zero[at]) == (not bool((own[active] == o.argmax()).any()))
            same = (int(y.argmax()) == int(r.argmax()), int(y.argmax()) == int(o.argmax()))
            case = {(True, True): "agreement", (True, False): "residual", (False, True): "feed-forward"}
            assert CASES[int(one.case[at])] == case.get(same, "compromise")


@pytest.mark.parametrize(("family", "half"), [("bert", "encoder"), ("t5", "encoder"), ("bart", "decoder")])
def test_a_report_leaves_out_what_a_stack_does_not_allow(
    family: str, half: str, corpus: Corpus, tmp_path: Path
) -> None:
    stack = halves.stack_of(family, half)
    settings = Settings(top=TOP, positions=40)
    report = ffedit.inspect_model(stack, corpus, tmp_path / "out", settings=settings, removing=Removing(3, 2))
    missing = {measure.name for measure in report.measures if set(measure.values) == {None}}
    removed = {"removed_first", "removed_last", "removed_random"}
    following = {"agreement", "agreement_dealt", "rank", "rank_dealt"}
    assert missing == removed | (following if half == "encoder" else set())
    assert (report.surest.agrees is None) == (report.sureness == ()) == (half == "encoder") and report.surest.count > 0
    assert all((shift.next is None) == (half == "encoder") and "«" in shift.prefix for shift in report.shifts)
    assert report.stack == half and report.note is not None
    if half == "decoder":
        m = torch.stack([layers[0]["m"] for layers in plain(family, half).values()])
        top = [follows(spot, half) for spot in (list(plain(family, half))[i] for i in m.argmax(0).tolist())]
        fires = m.max(0).values > 0
        says = read(family, half, stack.model, stack.memories[0].value.T).argmax(-1).tolist()
        agrees = [a == b for a, b, c in zip(top, says, fires.tolist(), strict=True) if c]
        assert report["agreement"].values[0] == pytest.approx(sum(agrees) / len(agrees))
    again = ffedit.inspect_model(stack, corpus, tmp_path / "out", settings=settings, removing=Removing(3, 2))
    assert again == report


def test_a_long_text_is_cut_into_rows_that_are_texts(tmp_path: Path) -> None:
    (path := tmp_path / "long.txt").write_text("the old tower stands in Rome . " * 60)
    for half, start in (("encoder", ()), ("decoder", (2,))):
        rows = list(rows_of(halves.stack_of("bart", half), Corpus(path, tokens=200)))
        assert all(row[: len(start) + 1] == (*start, 0) for row in rows)
        assert all(row[-1] == 1 and len(row) == 64 + len(start) for row in rows[:-1])
        assert sum(len(row) - len(start) for row in rows) == 200
