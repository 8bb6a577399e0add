"""m = f(x Kᵀ + b) is what the value matrix receives, and attention over the memories is the layer, in every family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.loading.verify import find_and_verify
from ffedit.model import roles
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.roles import Role, register_activation

IDS = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])
PLAIN = {
    *("gpt2", "gpt2_square", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "mpt", "codegen", "phi", "starcoder2"),
    *("falcon", "falcon_new", "falcon_alibi"),
}


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """What a test registers ends with it."""
    names, activations = list(roles.KEY_ROLES), dict(roles.ACTIVATIONS)
    yield
    roles.KEY_ROLES[:] = names
    roles.ACTIVATIONS.clear()
    roles.ACTIVATIONS.update(activations)


def seen(editable: Editable, memory: KeyValueMemory) -> tuple[Tensor, Tensor, Tensor]:
    """What the layer receives [n, d_model], the coefficients [n, d_ff] and its output [n, d_model] in a real pass."""
    entering = {"x": memory.key_rows.first, "m": memory.module}
    with capture(entering, inputs=True) as given, capture({"o": memory.module}) as gave, torch.no_grad():
        editable.model(input_ids=IDS)
    return given["x"].flatten(0, -2), given["m"].flatten(0, -2), gave["o"].flatten(0, -2)


def check_layer(editable: Editable, layer: int, tolerance: float = 1e-5) -> None:
    memory = editable.memories[layer]
    x, m, output = seen(editable, memory)
    torch.testing.assert_close(memory.coefficients(x), m, rtol=tolerance, atol=tolerance * float(m.abs().max()))
    torch.testing.assert_close(memory.attend(x), output, rtol=tolerance, atol=tolerance * float(output.abs().max()))


def refusal(memory: KeyValueMemory) -> str:
    with pytest.raises(ModelError) as caught:
        _ = memory.key_rows
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Every family -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*zoo.FAMILIES, *zoo.HYBRIDS])
def test_attention_over_the_memories_is_the_layer(family: str) -> None:
    editable = zoo.shared(family)
    assert len(editable.layers) == len(editable.memories) == zoo.DEPTH
    for layer in range(zoo.DEPTH):
        check_layer(editable, layer)
        rows = editable.memories[layer].key_rows
        assert rows.tensors().rows.shape == (editable.memories[layer].d_ff, zoo.WIDTH)
        assert rows.gated == (rows.tensors().up is not None)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_gated_families_are_told_apart(family: str) -> None:
    rows = zoo.shared(family).memories[1].key_rows
    assert rows.gated == (family not in PLAIN)
    assert rows.role.fused == (family in ("phi3", "glm"))


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gemma2"])
def test_coefficients_from_the_first_layer_in_sixteen_bits(family: str) -> None:
    check_layer(zoo.build(family, dtype=torch.bfloat16), 1, tolerance=2e-2)


def test_the_rows_are_views_of_the_weights() -> None:
    rows = zoo.shared("gpt2").memories[0].key_rows
    assert rows.tensors().rows.data_ptr() == rows.first.weight.data_ptr()  # type: ignore[union-attr, operator]
    up = zoo.shared("phi3").memories[0].key_rows
    assert up.tensors().up is not None and torch.equal(up.tensors().up, up.first.weight[48:])  # type: ignore[index]


def test_gradients_flow_to_the_queries() -> None:
    memory = zoo.shared("llama").memories[1]
    x = torch.randn(2, zoo.WIDTH, requires_grad=True)
    memory.attend(x).sum().backward()
    assert x.grad is not None and float(x.grad.abs().sum()) > 0


# Every activation, by a formula of its own ---------------------------------------------------------


def gelu(z: Tensor) -> Tensor:
    return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def gelu_tanh(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def silu(z: Tensor) -> Tensor:
    return z / (1 + torch.exp(-z))


def relu(z: Tensor) -> Tensor:
    return torch.where(z > 0, z, 0.0)


FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (relu, "relu"),
    "relu2": (lambda z: relu(z) ** 2, "relu2"),
    "gelu": (gelu, "gelu"),
    "gelu_tanh": (gelu_tanh, "gelu_pytorch_tanh"),
    "swish": (silu, "silu"),
}


def one_by_one(memory: KeyValueMemory, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ_i f(x · k_i + b_i) [(x · u_i + c_i)] v_i + b, in float64, memory by memory; x [n, d_model]."""
    parts = dict(memory.block.named_modules())  # type: ignore[union-attr]
    value = memory.module
    gate, up = parts.get("mlp.gate_proj"), parts.get("mlp.up_proj")
    total = torch.zeros(len(x), zoo.WIDTH, dtype=torch.float64)
    for i in range(memory.d_ff):
        if gate is not None and up is not None:
            m = f(x @ gate.weight[i].double() + (0 if gate.bias is None else gate.bias[i].double()))
            m = m * (x @ up.weight[i].double() + (0 if up.bias is None else up.bias[i].double()))
            v = value.weight[:, i]
        else:
            first = parts["mlp.c_fc"]
            m = f(x @ first.weight[:, i].double() + first.bias[i].double())
            v = value.weight[i]
        total += m[:, None] * v.double()
    return total if value.bias is None else total + value.bias.double()


def built(config: Any, parameters: int) -> Editable:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    assert model.num_parameters() == parameters, model.num_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return find_and_verify(model, zoo.words(), "m")


def plain(activation: str) -> Editable:
    ids = {"vocab_size": zoo.VOCAB, "bos_token_id": 0, "eos_token_id": 1}
    return built(hf.GPT2Config(**zoo._GPT, **ids, activation_function=activation), 43_328)


def gated(activation: str, bias: bool) -> Editable:
    config = hf.LlamaConfig(**zoo._LLAMA, vocab_size=zoo.VOCAB, hidden_act=activation, mlp_bias=bias)
    return built(config, 29_472 + bias * 3 * (48 + 48 + 32))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kind", ["plain", "gated", "gated with biases"])
def test_each_activation_is_its_formula(kind: str, name: str) -> None:
    f, called = FORMULAS[name]
    editable = plain(called) if kind == "plain" else gated(called, bias=kind.endswith("biases"))
    memory = editable.memories[1]
    check_layer(editable, 1)
    assert (memory.key_rows.tensors().bias is not None) == (kind != "gated")
    assert (memory.key_rows.tensors().up_bias is not None) == (kind == "gated with biases")
    x, _, output = seen(editable, memory)
    with torch.no_grad():
        expected = one_by_one(memory, x.double(), f)
    torch.testing.assert_close(memory.attend(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


class SoLU(nn.Module):
    """x softmax(x), with the norm that its authors put behind it, or without; over all coefficients at once."""

    def __init__(self, d_ff: int, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_ff) if norm else nn.Identity()

    def forward(self, z: Tensor) -> Tensor:
        normed: Tensor = self.norm(z * z.softmax(-1))
        return normed


@pytest.mark.parametrize("norm", [False, True])
def test_solu_looks_at_all_coefficients_at_once(norm: bool) -> None:
    model = zoo.model("gpt2")
    for layer in model.transformer.h:
        layer.mlp.act = SoLU(128, norm)
    editable = find_and_verify(model, zoo.words(), "solu")
    check_layer(editable, 1)
    memory = editable.memories[1]
    x, m, _ = seen(editable, memory)
    z = x @ memory.key_rows.tensors().rows.T + memory.key_rows.tensors().bias
    expected = z.exp() / z.exp().sum(-1, keepdim=True) * z
    if norm:
        mean, spread = expected.mean(-1, keepdim=True), expected.var(-1, unbiased=False, keepdim=True)
        expected = (expected - mean) / (spread + 1e-5).sqrt()
    torch.testing.assert_close(m, expected, rtol=1e-3, atol=1e-4)
    assert memory.key_rows.activation_name == "SoLU"


# What is not known is said in one line, with what helps ----------------------------------------------


class Spoken(nn.Module):
    """A feed-forward layer that keeps the name of its activation only."""

    def __init__(self, mlp: Any, activation: str | None, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.f = mlp.c_fc, mlp.c_proj, [f]
        if activation is not None:
            self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.c_proj(self.f[0](self.c_fc(x)))
        return given


def spoken(activation: str | None, f: Callable[[Tensor], Tensor]) -> Editable:
    model = zoo.model("gpt2")
    for layer in model.transformer.h:
        layer.mlp = Spoken(layer.mlp, activation, f)
    return find_and_verify(model, zoo.words(), "spoken")


def test_an_unknown_activation_is_named_and_can_be_registered() -> None:
    def solu(z: Tensor) -> Tensor:
        return z * z.softmax(-1)

    editable = spoken("solu", solu)
    text = refusal(editable.memories[1])
    assert "solu is an unknown activation" in text and 'register_activation("solu", function)' in text
    assert text.startswith("transformer.h.1.mlp.c_proj")
    register_activation("solu", solu)
    check_layer(editable, 1)


def test_an_activation_that_transformers_knows_by_name_needs_no_registering() -> None:
    check_layer(spoken("relu", torch.relu), 1)


def test_a_layer_without_an_activation_attribute_is_registered_by_its_class() -> None:
    editable = spoken(None, torch.relu)
    assert 'register_activation("Spoken", function)' in refusal(editable.memories[0])
    register_activation("Spoken", torch.relu)
    check_layer(editable, 0)


def test_an_attribute_that_says_something_else_than_the_layer_does_is_caught() -> None:
    editable = spoken("relu", torch.sigmoid)
    text = refusal(editable.memories[0])
    assert "differ from those observed" in text and 'register_activation("relu", function)' in text
    register_activation("relu", torch.sigmoid)
    check_layer(editable, 0)


def test_a_first_matrix_that_is_called_otherwise_is_named_in_a_row_and_does_not_hinder_editing() -> None:
    model = zoo.model("gpt2")
    for layer in model.transformer.h:
        layer.mlp.add_module("grow", layer.mlp.c_fc)
        del layer.mlp.c_fc

        def run(x: Tensor, mlp: Any = layer.mlp) -> Tensor:
            given: Tensor = mlp.c_proj(mlp.act(mlp.grow(x)))
            return given

        layer.mlp.forward = run
    editable = find_and_verify(model, zoo.words(), "renamed")
    text = refusal(editable.memories[2])
    assert "mlp.grow" in text and "ROLES.insert" in text
    roles.KEY_ROLES.insert(0, Role("grow"))
    check_layer(editable, 2)


def test_a_first_matrix_of_another_size_is_not_taken() -> None:
    model = zoo.model("phi3")
    editable = find_and_verify(model, zoo.words(), "m")
    roles.KEY_ROLES[:] = [Role("gate_up_proj")]
    assert "keys of its 48 memories" in refusal(editable.memories[0])


def test_a_memory_that_stands_in_no_model_has_no_keys() -> None:
    memory = KeyValueMemory(Address(0), "h.0.mlp.c_proj", nn.Linear(4, 2), False, torch.float32)
    assert "belongs to no model" in refusal(memory)


def test_keys_can_be_looked_for_while_memories_are_turned() -> None:
    memory = zoo.build("gpt2").memories[0]
    with memory.scaled(dict.fromkeys(range(128), 0.0)):
        assert memory.key_rows.activation_name == "NewGELUActivation"
