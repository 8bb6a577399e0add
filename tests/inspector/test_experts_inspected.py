"""The inspector on mixtures of experts: its numbers are those of each family's own formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import made
from mixing import PLAIN, PROMPT, SHARED, block_of, plain, plain_expert, values_of
from shell import TEXT, save_model, shell
from shown import shown

import ffedit
from ffedit import Corpus
from ffedit.display.terminal.memories import edited_view, memory_view, prompt_view
from ffedit.errors import ModelError
from ffedit.inspector.edit_view import inspect_edit
from ffedit.inspector.memory_view import inspect_memory
from ffedit.inspector.prompt_view import inspect_prompt
from ffedit.model.hooks import capture
from ffedit.model.memory import Address


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (path := tmp_path / "text.txt").write_text(TEXT * 2)
    return Corpus(path)


# A prompt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PLAIN)
@torch.no_grad()
def test_all_numbers_are_those_of_the_family_s_own_formula(family: str) -> None:
    editable = zoo.shared(family)
    view = inspect_prompt(editable, PROMPT, top=6)
    blocks = {layer: block_of(editable, layer) for layer in range(3)}
    with capture(blocks, inputs=True) as entered, capture(blocks) as gave:
        editable.model(input_ids=torch.tensor([editable.tokenizer(PROMPT)["input_ids"]]))
    for number, layer in enumerate(view.layers):
        block, x = blocks[number], entered[number].reshape(-1, 32)[-1]
        weights, keys = plain(family, block, x)
        parts = {e: m[:, None] * values_of(family, block, e) for e, m in keys.items()}
        bias = sum(g * block.experts.down_proj_bias[e] for e, g in weights.items()) if family == "gpt_oss" else 0 * x
        o = torch.cat(list(parts.values())).sum(0) + bias
        torch.testing.assert_close(o, gave[number].reshape(-1, 32)[-1], rtol=1e-4, atol=1e-5)
        assert layer.address == Address(number) and {one.address.expert for one in layer.experts} == set(weights)
        for one in layer.experts:
            expert = one.address.expert
            assert one.weight == pytest.approx(weights[expert], rel=1e-4) and one.shared is (expert == 4)
            assert one.share == pytest.approx(float(parts[expert].sum(0) @ o / (o @ o)), rel=1e-3, abs=1e-5)
        strengths = {(e, i): float(s) for e, part in parts.items() for i, s in enumerate(part.norm(dim=1))}
        best = sorted(strengths, key=lambda at: -strengths[at])[:6]
        assert [(one.slot.address, one.slot.index) for one in layer.firing] == [
            (Address(number, e), i) for e, i in best
        ]
        for one, (e, i) in zip(layer.firing, best, strict=True):
            assert one.coefficient == pytest.approx(float(keys[e][i]), rel=1e-4, abs=1e-5)
            assert one.strength == pytest.approx(strengths[e, i], rel=1e-4)
            assert one.share == pytest.approx(float(parts[e][i] @ o / (o @ o)), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("width", [80, 120])
def test_a_prompt_is_told_with_its_experts(width: int) -> None:
    view = inspect_prompt(zoo.shared("qwen2_moe"), PROMPT, scaled={"1.3.2": 0}, top=2)
    text = shown(prompt_view(view), width)
    for words in ("Experts that the token goes to", "includes the router's weight", "shared (", "1.3.2 × 0"):
        assert words in text
    assert all(f"{one.address} × " in text for layer in view.layers for one in layer.experts)
    assert "Experts that" not in shown(prompt_view(inspect_prompt(zoo.shared("gpt2"), PROMPT)), width)
    assert view.to_dict()["layers"][1]["experts"][0]["address"] == str(view.layers[1].experts[0].address)


# One memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PLAIN)
@torch.no_grad()
def test_a_memory_of_an_expert_is_what_a_plain_search_finds(family: str, corpus: Corpus) -> None:
    editable, block = zoo.shared(family), block_of(zoo.shared(family), 1)
    view = inspect_memory(editable, "1.2.7", corpus=corpus, top=5)
    text = tuple(editable.tokenizer(TEXT * 2)["input_ids"])
    found: dict[tuple[int, ...], float] = {}
    sent = []
    assert len(text) <= 65
    for end in range(len(text) - 1):
        ids = text[: end + 1]
        with capture({0: block}, inputs=True) as entered:
            editable.model(input_ids=torch.tensor([ids]))
        _, keys = plain(family, block, entered[0].reshape(-1, 32)[-1])
        found[ids] = float(keys[2][7]) if 2 in keys else 0.0
        sent.append(2 in keys)
    best = [ids for ids in sorted(found, key=lambda ids: -found[ids]) if found[ids] > 0][:5]
    assert best and [one.coefficient for one in view.triggers] == pytest.approx([found[i] for i in best], rel=1e-3)
    assert [one.prefix.last.strip() for one in view.triggers] == [editable.tokenizer.decode(i[-1]) for i in best]
    assert view.sent == pytest.approx(sum(sent) / len(sent)) and 0 < view.sent < 1
    assert view.active == pytest.approx(sum(m > 0 for m in found.values()) / len(found))
    value = values_of(family, block, 2)[7]
    assert view.value_norm == pytest.approx(float(value.norm())) and view.memories == len(values_of(family, block, 2))
    p = editable.model.lm_head(editable.model.model.norm(value)).softmax(-1)
    assert [one.id for one in view.value.top] == p.topk(5).indices.tolist()


def test_a_memory_of_an_expert_that_no_token_reaches_is_silent(corpus: Corpus) -> None:
    text = shown(memory_view(inspect_memory(zoo.shared("mixtral"), "1.2.7", corpus=corpus)))
    assert "expert 2 of layer 1" in text and "router" in text and "0 at all other tokens" in " ".join(text.split())
    for family, name in (("qwen2_moe", "1.4.7"), ("gpt2", "1.7")):  # all tokens go there
        view = inspect_memory(zoo.shared(family), name, corpus=corpus)
        assert view.sent is None and "router" not in shown(memory_view(view))


# The same memory read other ways ------------------------------------------------------------------


@pytest.mark.parametrize("family", PLAIN)
@torch.no_grad()
def test_an_expert_is_attention_over_its_keys_and_values(family: str) -> None:
    editable, x = zoo.shared(family), torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    block = block_of(editable, 1)
    for expert in range(4):
        memory = editable.memories[Address(1, expert)]
        m = torch.stack([plain_expert(family, block, expert, one) for one in x])
        torch.testing.assert_close(memory.coefficients(x), m, rtol=1e-4, atol=1e-4)
        bias = block.experts.down_proj_bias[expert] if family == "gpt_oss" else 0
        torch.testing.assert_close(memory.attend(x), m @ values_of(family, block, expert) + bias, rtol=1e-4, atol=1e-3)
        key_rows, rows = memory.key_rows, memory.key_rows.tensors()
        gate, up = x @ rows.rows.T, x @ rows.up.T
        if family == "gpt_oss":
            gate, up = (gate + rows.bias).clamp(max=7), (up + rows.up_bias).clamp(-7, 7) + 1
        else:
            assert rows.bias is None and rows.up_bias is None
        alpha = 1.702 if family == "gpt_oss" else 1.0
        torch.testing.assert_close(gate * torch.sigmoid(alpha * gate) * up, m, rtol=1e-4, atol=1e-4)
        assert key_rows.gated and key_rows.role.fused and rows.rows.shape == (memory.d_ff, 32)
        shares = rows.rows.untyped_storage().data_ptr() == block.experts.gate_up_proj.untyped_storage().data_ptr()
        assert shares, "views of the model's weights"
    if family in SHARED:
        shared, own = editable.memories[Address(1, 4)], block.shared_expert
        torch.testing.assert_close(shared.attend(x), own(x), rtol=1e-4, atol=1e-4)


def test_an_order_of_gate_and_up_that_is_not_known_is_refused() -> None:
    editable = zoo.build("mixtral")
    memory = editable.memories[Address(1, 0)]
    module: Any = memory.module
    usual = module._apply_gate
    for strange in (
        lambda z: usual(z).flip(-1),
        lambda z: usual(torch.cat(z.chunk(2, -1)[::-1], -1)),  # the gate behind
    ):
        module._apply_gate = strange
        with pytest.raises(ModelError, match="neither two halves nor alternating rows") as caught:
            _ = memory.key_rows.tensors()
        assert "\n" not in str(caught.value)
        assert memory.coefficients(torch.randn(2, 32)).shape == (2, 48)
        del memory.__dict__["key_rows"]


# An edit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PLAIN)
def test_an_edit_of_experts_is_memories_of_each_of_them(family: str, corpus: Corpus) -> None:
    editable = zoo.build(family)
    places = {Address(1, 3): 1, Address(1, 2): 2, Address(2, 4 if family in SHARED else 0): 1}
    edit, before = made(editable, places, size=0.3), zoo.snapshot(editable)
    view = inspect_edit(editable, edit, corpus=corpus, top=4)
    assert zoo.unchanged(editable, before) and not editable.history.edits
    assert [layer.address for layer in view.layers] == sorted(places)
    assert view.changed > 0
    for layer in view.layers:
        delta, memory = edit.updates[layer.address].dense, editable.memories[layer.address]
        assert layer.relative == pytest.approx(float(delta.norm() / memory.value.norm()), rel=1e-5)
        assert len(layer.added) == places[layer.address]
        for one in layer.added:
            assert all(trigger.coefficient is not None and trigger.coefficient > 0 for trigger in one.triggers)
    text = shown(edited_view(view))
    assert "memory that expert 3 of layer 1 gets" in " ".join(text.split())


# The command line ---------------------------------------------------------------------------------


def test_the_commands_take_a_mixture(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(zoo.build("qwen2_moe", True), empty / "model")
    (empty / "text.txt").write_text(TEXT)
    made(ffedit.load(model), {Address(1, 2): 1}, size=0.3).save(empty / "edit")
    given = ("--model", model, "--corpus", "text.txt", "--html", "page.html")
    for words, says in (
        (("memory", "1.3.7", *given), "expert 3 of layer 1"),
        (("prompt", PROMPT, "--set", "1.4.0=0", *given[:2], *given[4:]), "Experts that the token goes to"),
        (("edit", "edit", *given), "memory that expert 2 of layer 1 gets"),
    ):
        done = shell(capsys, "inspect", *words)
        assert (done.code, done.err) == (0, ""), done.err
        assert says in done.out and says.split()[0].lower() in Path("page.html").read_text().lower()
    done = shell(capsys, "inspect", "memory", "1.9.7", *given)
    assert done.code != 0 and "experts 0 to 4" in done.err and done.err.count("\n") == 1
