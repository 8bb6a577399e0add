"""The prompt view: the numbers of a plain pass, the theorems behind them, and turning memories."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import zoo
from shown import shown
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

import ffedit
from ffedit import EditError
from ffedit.display.terminal.memories import prompt_view
from ffedit.errors import FactError, FFEditError
from ffedit.inspector.prompt_view import inspect_prompt
from ffedit.model.hooks import capture
from ffedit.model.memory import Address

PROMPT = "the Eiffel tower is located in"


def layer_norm(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias


def rms_norm(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return x / (x.square().mean() + norm.variance_epsilon).sqrt() * norm.weight


def plain_gpt2(model: torch.nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    block = model.transformer.h[layer]
    m = gelu(layer_norm(x, block.ln_2) @ block.mlp.c_fc.weight + block.mlp.c_fc.bias, approximate="tanh")
    return m, block.mlp.c_proj.weight, block.mlp.c_proj.bias


def plain_opt(model: torch.nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    block = model.model.decoder.layers[layer]
    m = relu(block.fc1.weight @ layer_norm(x, block.final_layer_norm) + block.fc1.bias)
    return m, block.fc2.weight.T, block.fc2.bias


def plain_llama(model: torch.nn.Module, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    block = model.model.layers[layer]
    x = rms_norm(x, block.post_attention_layernorm)
    m = silu(block.mlp.gate_proj.weight @ x) * (block.mlp.up_proj.weight @ x)
    return m, block.mlp.down_proj.weight.T, torch.zeros(len(x))


# family: (feed-forward layer, attention by layer, final norm); GPT-2 and OPT tie their embeddings, Llama does not.
PLAIN: dict[str, tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], str, Callable[..., Tensor], str]] = {
    "gpt2": (plain_gpt2, "transformer.h.{}.attn.c_proj", layer_norm, "transformer.ln_f"),
    "opt": (plain_opt, "model.decoder.layers.{}.self_attn.out_proj", layer_norm, "model.decoder.final_layer_norm"),
    "llama": (plain_llama, "model.layers.{}.self_attn.o_proj", rms_norm, "model.norm"),
}


@pytest.mark.parametrize("family", PLAIN)
@torch.no_grad()
def test_all_numbers_are_those_of_a_plain_pass(family: str) -> None:
    feed_forward, attention, norm, final = PLAIN[family]
    editable = zoo.build(family)  # its own: transformers leaves hooks where hidden states were asked for
    model, view = editable.model, inspect_prompt(editable, PROMPT, top=4)
    assert view.norm == final and [word.strip() for word in view.tokens] == PROMPT.split()
    head, last = model.get_output_embeddings().weight, model.get_submodule(final)

    def lens(x: Tensor) -> Tensor:
        return (head @ norm(x, last)).softmax(-1)

    attentions = {i: model.get_submodule(attention.format(i)) for i in range(3)}
    with capture(attentions) as attended:
        out = model(input_ids=torch.tensor([editable.tokenizer(PROMPT)["input_ids"]]), output_hidden_states=True)
    p = out.logits[0, -1].softmax(-1)
    assert view.prediction.max_probability == pytest.approx(float(p.max()), abs=1e-5)
    assert view.prediction.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)
    assert [one.id for one in view.prediction.top] == p.topk(4).indices.tolist()
    assert [one.id for one in view.prediction.bottom] == p.topk(4, largest=False).indices.tolist()
    for i, layer in enumerate(view.layers):
        before = out.hidden_states[i][0, -1] + attended[i].reshape(-1, len(out.hidden_states[0][0, 0]))[-1]
        m, values, bias = feed_forward(model, i, before)
        o = m @ values + bias
        for reading, x in ((layer.before, before), (layer.output, o), (layer.after, before + o)):
            assert reading.says.id == int(lens(x).argmax())
            assert reading.says.probability == pytest.approx(float(lens(x).max()), abs=1e-5)
            assert reading.final == pytest.approx(float(lens(x)[p.argmax()]), abs=1e-5)
            assert reading.rank == int((lens(x) > lens(x)[p.argmax()]).sum()) + 1
        strengths = (m[:, None] * values).norm(dim=1)
        assert [one.slot.index for one in layer.firing] == strengths.topk(4).indices.tolist()
        for one in layer.firing:
            j = one.slot.index
            said = lens(m[j].sign() * values[j])
            assert one.coefficient == pytest.approx(float(m[j]), rel=1e-5, abs=1e-5)
            assert one.strength == pytest.approx(float(strengths[j]), rel=1e-5)
            assert one.share == pytest.approx(float(m[j] * values[j] @ o / (o @ o)), rel=1e-4, abs=1e-5)
            assert one.promotes.id == int(said.argmax())
            assert one.promotes.probability == pytest.approx(float(said.max()), abs=1e-5)


@pytest.mark.parametrize("family", [*zoo.FAMILIES, *zoo.MIXTURES])
def test_the_last_stream_reads_as_the_prediction_and_shares_make_one(family: str) -> None:
    editable = zoo.shared(family)
    view = inspect_prompt(editable, PROMPT, top=1000)
    assert view.layers[-1].after.final == pytest.approx(view.prediction.max_probability, abs=1e-5)
    assert view.layers[-1].after.rank == 1
    says = [layer.after.says.id == view.prediction.top[0].id for layer in view.layers]
    assert view.appears == says.index(True) <= view.settles and all(says[view.settles :])
    assert view.settles == 0 or not says[view.settles - 1]
    for layer in view.layers:
        memories = [memory for memory in editable.memories.values() if memory.address.layer == layer.address.layer]
        dense = memories[0].address.expert is None
        assert (layer.experts == ()) is dense
        if all(memory.bias is None for memory in memories):  # a bias has a share, too
            assert sum(one.share for one in layer.firing) == pytest.approx(1, abs=1e-3)
            assert dense or sum(one.share for one in layer.experts) == pytest.approx(1, abs=1e-3)
        order = [(one.shared, -one.weight) for one in layer.experts]
        assert order == sorted(order)


MISTAKES: list[tuple[dict[str, object], type[FFEditError], str]] = [
    ({"prompt": "  "}, EditError, "empty"),
    ({"prompt": "the " * 100}, FactError, "reads at most 64"),
    ({"scaled": {"3.1": 0}}, EditError, "layers 0 to 2"),
    ({"scaled": {"1.2": float("nan")}}, EditError, "finite"),
    ({"scaled": {"1.2": 1e300}}, EditError, "32 bits"),
    ({"scaled": {"1.2": 1e38}}, EditError, "smaller factors"),
]


@pytest.mark.parametrize(("arguments", "kind", "says"), MISTAKES)
def test_mistakes_are_told_in_one_line(arguments: dict[str, object], kind: type[FFEditError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        inspect_prompt(zoo.shared("gpt2"), **{"prompt": PROMPT, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_model_without_a_final_norm_is_read_through_the_unembedding_alone() -> None:
    editable = copy.copy(zoo.shared("gpt2"))
    editable.norm = ""
    view = inspect_prompt(editable, PROMPT)
    assert view.norm is None and "no final norm" in shown(prompt_view(view))


@pytest.mark.parametrize("width", [80, 120])
def test_a_view_fits_the_terminal_with_all_its_columns(width: int) -> None:
    view = inspect_prompt(zoo.shared("llama"), PROMPT, scaled={"0.1": 0}, top=2)
    text = shown(prompt_view(view), width)
    for words in ("without it", "promotes", "unscaled"):
        assert words in text
    assert "…" not in text
    assert view.layers[0].address == Address(0) and ffedit.inspect_prompt is inspect_prompt
