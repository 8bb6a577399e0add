"""A mixture of experts is edited where the fact's key passes through, and nowhere else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from writing import quick, with_numbers

import ffedit
from ffedit import Fact
from ffedit.algebra import updates
from ffedit.algebra.linalg import Blocks
from ffedit.editor.key import build_prompts
from ffedit.editor.statistics import collect
from ffedit.editor.target_layers import check_routes, find_ff_layers
from ffedit.editor.write import write
from ffedit.errors import EditError
from ffedit.inference import routing
from ffedit.inference.corpus import Corpus
from ffedit.inference.replay import run_to
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address
from ffedit.model.tokenization import pad

pytestmark = pytest.mark.usefixtures("warm_cache")

FACT = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris")
SECOND = Fact("Leo Tolstoy", "{} stands in", "France", "Germany")
BARE = quick(contexts=0, kl_weight=0.0, steps=4, context_weight=0.0)
TEXT = Corpus(tokens=1024)
FAMILIES = list(zoo.MIXTURES)


def edited(editable: Editable, method: str = "rome", facts: tuple[Fact, ...] = (FACT,), **numbers: Any) -> ffedit.Edit:
    config = with_numbers(BARE, alphaedit_null_share=0.5, memit_ridge=1e-9, alphaedit_ridge=1e-9, **numbers)
    return write(editable, facts, method, [len(editable.layers) - 2], config, TEXT)


def output(editable: Editable, layer: int, fact: Fact) -> Tensor:
    """What the layer's feed-forward block gives at the subject's last token of the bare prompt, [d_model]."""
    text = editable.encode(fact.text, fact.new_object, fact.span)
    with capture({0: editable.feed_forward[layer].module}) as gave:
        run_to(editable, pad([text.ids]), layer)
    return gave[0].reshape(len(text.ids), -1)[text.subject_last].double()


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "emmet") for family in FAMILIES),
        *(("qwen2_moe", method) for method in ("rome", "memit", "alphaedit")),
    ],
)
def test_the_real_forward_pass_gives_the_asked_value(family: str, method: str) -> None:
    """(W + Δ) k* = v* over all experts together, with the router's weights, as the model itself computes it."""
    editable = zoo.build(family)
    layer, before = len(editable.layers) - 2, zoo.snapshot(editable)
    edit = edited(editable, method)
    assert zoo.unchanged(editable, before), "computing an edit changes nothing"
    was = output(editable, layer, FACT)
    asked = sum(edit.values[at] - editable.memories[at].value.double() @ edit.keys[at] for at in edit.updates)
    with edit.applied(editable):
        moved = output(editable, layer, FACT) - was
        after = editable.model.state_dict()
        changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert isinstance(asked, Tensor) and float(asked.norm()) > 0
    torch.testing.assert_close(moved, asked[:, 0], rtol=1e-4, atol=1e-4 * float(asked.abs().max()))
    assert all(name.endswith(("experts.down_proj", "down_proj.weight")) for name in changed), "no router, no keys"
    assert zoo.unchanged(editable, before), "undone to the bit"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_is_written_to_the_experts_that_the_router_chose(family: str) -> None:
    editable = zoo.build(family)
    layer = len(editable.layers) - 2
    edit = edited(editable)
    text = editable.encode(FACT.text, FACT.new_object, FACT.span)
    chosen = routing.routes(editable, [text], [layer])[layer].chosen[0].nonzero()[:, 0].tolist()
    shared = sorted(editable.feed_forward[layer].mixture.shared)  # type: ignore[union-attr]
    assert list(edit.updates) == [Address(layer, expert) for expert in (*chosen, *shared)]
    about = edit.provenance["routing"][str(layer)]
    assert about["written"] == [*chosen, *shared] and about["covered"] == pytest.approx(1) and about["moved"] == 0
    assert [int(e) for e in about["experts"]] == chosen and all(e["share"] == 1 for e in about["experts"].values())


def test_routes_are_those_of_the_router_in_any_company() -> None:
    editable = zoo.build("qwen3_moe")
    texts = [editable.encode(fact.text, fact.new_object, fact.span) for fact in (FACT, SECOND)]
    together = routing.routes(editable, texts, [0, 2])
    alone = [routing.routes(editable, [text], [0, 2]) for text in texts]
    for layer in (0, 2):
        torch.testing.assert_close(together[layer].weights, torch.cat([one[layer].weights for one in alone]))
        assert together[layer].chosen.sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "qwen2_moe"])
def test_statistics_of_an_expert_are_those_of_its_part_of_all_tokens_keys(family: str) -> None:
    editable = zoo.build(family)
    place, memories = editable.feed_forward[1], list(editable.feed_forward[1].memories)
    found = collect(editable, memories, TEXT)
    assert {moments.count for moments in found.values()} == {1024}
    routed = [found[m.address].keys for m in memories if m.slot is not None]
    rows = 1024 // 64  # whose first keys are left out
    assert sum(routed) == (1024 - rows) * (1 if family == "llama4" else 2), (
        "each token goes to as many experts as the router says"
    )
    assert all(found[m.address].keys == 1024 - rows for m in memories if m.slot is None), "and to every shared one"
    assert place.shape[1] == sum(len(found[m.address].sum) for m in memories)


def test_an_expert_that_the_text_never_reached_is_refused() -> None:
    editable = zoo.build("mixtral")
    stats = collect(editable, list(editable.feed_forward[1].memories), TEXT)
    at = next(iter(edited(editable).updates))
    nothing = dataclasses.replace(stats[at], sum=torch.zeros_like(stats[at].sum), reached=0)
    before = zoo.snapshot(editable)
    with pytest.raises(EditError, match=rf"expert {at} of mixtral: none of the 1,024 tokens of .* reached it"):
        write(editable, [FACT], "rome", [1], BARE, {**stats, at: nothing})
    assert zoo.unchanged(editable, before)


def test_routing_that_flips_is_refused() -> None:
    editable = zoo.build("mixtral")
    prompt_sets = build_prompts(editable, [[FACT]], BARE)
    (place,) = find_ff_layers(editable, [1], build_prompts(editable, [[FACT]], BARE))
    check_routes(editable, place, [FACT.subject], prompt_sets)
    written = {memory.address for memory in place.memories}
    others = editable.feed_forward[1].only(set(editable.memories) - written)
    with pytest.raises(EditError, match="the edit of the layers below sends 'Eiffel tower' to expert 1"):
        check_routes(editable, others, [FACT.subject], prompt_sets)


def test_the_way_that_experts_are_computed_does_not_matter() -> None:
    edits = []
    for implementation in ("eager", "grouped_mm"):
        editable = zoo.build("mixtral")
        editable.model.set_experts_implementation(implementation)
        edits.append(edited(editable))
    assert edits[0].updates.keys() == edits[1].updates.keys()
    for at, delta in edits[0].updates.items():
        torch.testing.assert_close(delta.dense, edits[1].updates[at].dense, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["ft", "memit"])
def test_layers_and_baselines_work_on_mixtures(method: str) -> None:
    editable = zoo.build("qwen2_moe")
    before = zoo.snapshot(editable)
    layers = [1] if method == "ft" else [0, 1]
    edit = write(editable, [FACT, SECOND], method, layers, with_numbers(BARE, ft_steps=2), TEXT)
    assert {at.layer for at in edit.updates} == set(layers) and zoo.unchanged(editable, before)
    with edit.applied(editable):
        assert not zoo.unchanged(editable, before)
    assert zoo.unchanged(editable, before)


def test_edits_of_different_experts_combine() -> None:
    editable = zoo.build("mixtral")
    layer = len(editable.layers) - 2
    parts = [edited(editable, facts=(fact,)) for fact in (FACT, SECOND)]
    both = ffedit.combine(editable, parts, "emmet", stats=TEXT, config=BARE)
    assert set(both.updates) == set(parts[0].updates) | set(parts[1].updates)
    for fact, part in zip((FACT, SECOND), parts, strict=True):
        was = output(editable, layer, fact)
        asked = sum(part.values[at] - editable.memories[at].value.double() @ part.keys[at] for at in part.updates)
        with both.applied(editable):
            moved = output(editable, layer, fact) - was
        assert isinstance(asked, Tensor)
        torch.testing.assert_close(moved, asked[:, 0], rtol=1e-3, atol=1e-3 * float(asked.abs().max()))


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_checkpoint_with_edited_experts_is_streamed_reopened_and_undone(family: str, tmp_path: Path) -> None:
    """Mixtral's files keep experts apart, GPT-OSS's in one tensor."""
    model, tokenizer = zoo.model(family), zoo.words()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    editable = ffedit.load(str(tmp_path / "base"))
    edit = edited(editable)
    ffedit.export(str(tmp_path / "base"), edit, tmp_path / "out")
    again = ffedit.load(str(tmp_path / "out"))
    ids = torch.arange(12)[None]
    with edit.applied(editable):
        assert torch.equal(editable.model(input_ids=ids).logits, again.model(input_ids=ids).logits)
    edit.undo_(again)
    assert zoo.unchanged(again, zoo.snapshot(editable)), "the originals came along"
    ffedit.undo(tmp_path / "out", tmp_path / "back")
    assert zoo.unchanged(ffedit.load(str(tmp_path / "back")), zoo.snapshot(editable))


# Block-diagonal C ---------------------------------------------------------------------------------


def test_blocks_are_the_matrix_that_they_stand_for() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 9, dtype=torch.float64, generator=generator) for n in (3, 5, 2)]
    C = Blocks(tuple(part @ part.T + torch.eye(len(part)) for part in parts))
    dense = torch.block_diag(*C.blocks)
    W, K, V, P = (
        torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((4, 10), (10, 3), (4, 3), (10, 1))
    )
    for solve in (
        lambda c: updates.equality(W, K, V, c, P),
        lambda c: updates.least_squares(W, K, V, c, 0.1, P),
    ):
        torch.testing.assert_close(solve(C).dense, solve(dense).dense)
    same = K[:, 0], K.T, torch.tensor([0.5, 0.3, 0.2])
    rows = updates.context_spread([same], 0.5)
    spread, whole = updates.moment(rows, [3, 5, 2]), updates.moment(rows, [10])
    assert isinstance(spread, Blocks) and isinstance(whole, Tensor)
    torch.testing.assert_close(torch.block_diag(*spread.blocks), whole * (dense != 0))
    U = Blocks(tuple(torch.linalg.qr(block).Q[:, :2] for block in C.blocks))
    null = [updates.null_space(W, K, V, u, 0.1) for u in (U, torch.block_diag(*U.blocks))]
    torch.testing.assert_close(null[0].dense, null[1].dense)
    own = [updates.null_space(W, K, V, u, 0.0, P, c) for u, c in ((U, C), (torch.block_diag(*U.blocks), dense))]
    torch.testing.assert_close(own[0].dense, own[1].dense)
