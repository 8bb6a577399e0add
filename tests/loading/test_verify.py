"""Every family is recognised and verified; everything else is refused in one line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from torch import nn

from ffedit.errors import ModelError
from ffedit.loading.verify import find_and_verify
from ffedit.model.hooks import capture
from ffedit.model.memory import Address

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
IDS = torch.tensor([[3, 14, 15, 9, 26]])


def refusal(model: Any, name: str = "some/model", **options: Any) -> str:
    """What the user is told: one line with the model's name."""
    with pytest.raises(ModelError) as caught:
        find_and_verify(model, zoo.words(), name, **options)
    text = str(caught.value)
    assert text.startswith(name) and "\n" not in text
    return text


# What is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_layer_has_one_memory_of_the_right_size(family: str) -> None:
    editable = zoo.shared(family)
    assert len(editable.layers) == len(editable.memories) == zoo.DEPTH
    config = editable.model.config
    d_ff = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * zoo.WIDTH
    d_ff = {"gptj": 128, "gpt2_square": 32, "opt": 48, "mpt": 128}.get(family, d_ff)
    for layer in range(zoo.DEPTH):
        memory = editable.memories[layer]
        assert memory.address == Address(layer) and memory.d_ff == d_ff
        assert list(memory.value.shape) == [zoo.WIDTH, d_ff]


@pytest.mark.parametrize("family", ["gpt2", "gpt2_square", "gpt_neo", "llama_square"])
def test_the_orientation_is_declared_and_not_guessed(family: str) -> None:
    memory = zoo.shared(family).memories[1]
    assert memory.stored_transposed == family.startswith("gpt2")
    assert memory.value.data_ptr() == memory.weight.data_ptr(), "a view, so that writing to it writes the weight"


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_module_that_feeds_the_unembedding_is_found(family: str) -> None:
    editable = zoo.shared(family)
    norm = editable.model.get_submodule(editable.norm)
    with capture({0: norm}) as given, torch.no_grad():
        logits = editable.model(input_ids=IDS).logits
    cap = getattr(editable.model.config, "final_logit_softcapping", None)
    config = editable.model.config
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    expected = editable.unembedding(given[0]) * scale
    torch.testing.assert_close(logits, torch.tanh(expected / cap) * cap if cap else expected)


@pytest.mark.parametrize("family", ["gpt2", "falcon", "llama"])
def test_the_model_is_left_as_it_was_found(family: str) -> None:
    model = zoo.model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_and_verify(model, zoo.words(), family)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(getattr(module, kind, None) for module in model.modules() for kind in HOOKS)
    assert not any("forward" in module.__dict__ for module in model.modules())


# What is refused ----------------------------------------------------------------------------------


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    assert "not a causal decoder" in refusal(hf.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertLMHeadModel", "BertModel"])
def test_an_encoder_is_refused(kind: str) -> None:
    config = hf.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    assert refusal(getattr(hf, kind)(config).eval())


def test_a_model_that_looks_ahead_is_refused() -> None:
    class TwoWay(hf.GPT2LMHeadModel):
        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
            ahead = super().forward(input_ids=input_ids.flip(1), **options)
            ahead.logits = ahead.logits.flip(1)
            return ahead

    model = TwoWay(zoo.model("gpt2").config).eval()
    model.load_state_dict(zoo.model("gpt2").state_dict())
    assert "looks ahead" in refusal(model)


def test_something_that_is_no_transformers_model_is_refused() -> None:
    assert "found Linear" in refusal(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("path", "bad"),
    [("model.layers.1.mlp.up_proj.weight", float("nan")), ("model.embed_tokens.weight", float("inf"))],
)
def test_weights_that_are_not_finite_are_named(path: str, bad: float) -> None:
    model = zoo.model("llama")
    with torch.no_grad():
        model.get_parameter(path)[40, 3] = bad
    assert path in refusal(model)


def test_a_quantised_weight_is_refused_with_what_to_do() -> None:
    model = zoo.model("llama")
    down = model.get_submodule("model.layers.0.mlp.down_proj")
    down.weight = nn.Parameter(torch.zeros(down.weight.shape, dtype=torch.int8), requires_grad=False)
    text = refusal(model)
    assert "quantised" in text and "int8" in text and "16 or 32 bits" in text


def rename(model: Any, old: str, new: str) -> Any:
    for layer in model.get_decoder().layers:
        layer.mlp.add_module(new, getattr(layer.mlp, old))
        forward = {"gate": layer.mlp.gate_proj, "up": layer.mlp.up_proj, "down": getattr(layer.mlp, new)}
        delattr(layer.mlp, old)

        def run(x: torch.Tensor, parts: dict[str, nn.Module] = forward) -> torch.Tensor:
            return parts["down"](nn.functional.silu(parts["gate"](x)) * parts["up"](x))

        layer.mlp.forward = run
    return model


def test_renamed_modules_are_refused_with_what_was_seen_and_the_option_that_helps() -> None:
    text = refusal(rename(zoo.model("llama"), "down_proj", "shrink"))
    assert "mlp.shrink" in text and "mlp.gate_proj" in text and "--value-matrix" in text


@pytest.mark.parametrize("named", ["mlp.shrink", "layers.{}.mlp.shrink", "model.layers.{}.mlp.shrink"])
def test_a_named_value_matrix_is_used(named: str) -> None:
    editable = find_and_verify(rename(zoo.model("llama"), "down_proj", "shrink"), zoo.words(), "m", value_matrix=named)
    assert editable.memories[2].parameter == "model.layers.2.mlp.shrink.weight"
    assert torch.equal(editable.memories[2].value, zoo.shared("llama").memories[2].value)


def test_a_wrongly_named_value_matrix_is_refused() -> None:
    for named in ("mlp.nothing", "layers.{}.mlp.nothing", "layers.0.mlp.down_proj"):
        text = refusal(zoo.model("llama"), value_matrix=named)
        assert f"no module is called {named}" in text and "mlp.down_proj" in text
    assert "48 features, but d_model is 32" in refusal(zoo.model("llama"), value_matrix="mlp.up_proj")
    assert "LlamaRMSNorm" in refusal(zoo.model("llama"), value_matrix="input_layernorm")


def test_experts_whose_layout_is_not_declared_are_refused() -> None:
    model = zoo.model("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = type("Own", (nn.Module,), {})
    text = refusal(model)
    assert "layer 0: Own without _apply_gate is not a block of experts" in text and "dense model" in text


def test_a_module_that_does_more_than_multiply_is_refused() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 5

    model = zoo.model("llama")
    mlp = model.get_submodule("model.layers.1.mlp")
    adapted = Adapted(48, 32, bias=False)
    adapted.weight = mlp.down_proj.weight
    mlp.down_proj = adapted
    text = refusal(model)
    sides = re.search(r"W k \+ b is (\S+), but model.layers.1.mlp.down_proj gives (\S+) \(off by", text)
    assert sides is not None and "adapter" in text
    assert float(sides[2]) - float(sides[1]) == pytest.approx(5, abs=0.02), "both sides of the equation"


def test_layers_that_hand_on_more_than_a_stream_are_refused() -> None:
    model = zoo.model("llama")
    first, last = model.model.layers[0], model.model.layers[2]
    forwards, aside = (first.forward, last.forward), []

    def put(x: torch.Tensor, **more: Any) -> torch.Tensor:
        aside.append(forwards[0](x, **more))
        return aside[-1]

    first.forward, last.forward = put, lambda x, **more: forwards[1](x, **more) + aside.pop()
    assert "cannot continue a recorded pass" in refusal(model)


def test_a_check_that_runs_out_of_memory_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("ffedit.inference.replay.check", full)
    with pytest.raises(torch.OutOfMemoryError):
        find_and_verify(zoo.model("llama"), zoo.words())


def test_a_model_without_a_list_of_layers_is_refused_with_the_lists_seen() -> None:
    model = zoo.model("llama")
    layers = model.model.layers
    del model.model.layers
    model.model.layers = nn.Sequential(*layers)
    assert "but its module lists are: none" in refusal(model)
    model.model.layers = nn.ModuleList(layers[:2])
    assert "layers of 2" in refusal(model)


def test_a_model_on_the_meta_device_is_refused() -> None:
    assert "some weights are not loaded (meta device)" in refusal(zoo.model("llama").to("meta"))
