"""Sparse experts are one memory: attention over all their keys and values, scaled by the router."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.model.experts import Experts, Mixture, Routed
from ffedit.model.hooks import capture

IDS = torch.arange(2, 26).reshape(2, 12)
# Ways in which transformers multiplies with the matrices of all experts.
WAYS = ("eager", "grouped_mm", "batched_mm")


def passed(family: str, way: str = "eager") -> tuple[Mixture, Routed, dict[int, Tensor], Tensor]:
    """The last layer, what entered its experts in a pass, their keys [24, d_ff], and what it gave [24, d_model]."""
    editable = zoo.shared(family)
    mixture = editable.feed_forward[-1].mixture
    assert mixture is not None
    keys: dict[int, Tensor] = {}
    entered: list[Routed] = []

    def see(expert: int, rows: Tensor | None, key: Tensor, tokens: int) -> None:
        keys[expert] = key.clone() if rows is None else torch.zeros(tokens, key.shape[1]).index_copy(0, rows, key)

    declared = family != "llama4"  # whose experts have one way only
    usual = editable.model.config._experts_implementation
    if declared:
        editable.model.set_experts_implementation(way)
        assert mixture.experts.module.config._experts_implementation == way
    try:
        with mixture.watched(see, entered.append), capture({0: mixture.block}) as gave, torch.no_grad():
            editable.model(input_ids=IDS)
    finally:
        if declared:
            editable.model.set_experts_implementation(usual)
    assert not mixture.block._forward_pre_hooks and not mixture.experts.module._forward_pre_hooks
    assert len(entered) == 1
    return mixture, entered[0], keys, gave[0].reshape(24, -1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", zoo.MIXTURES)
@torch.no_grad()
def test_attention_over_the_union_of_the_experts_memories_is_the_block(family: str, way: str) -> None:
    mixture, entered, keys, output = passed(family, way)
    close(mixture.attend(entered, {number: keys[number] for number in mixture.shared}), output)


@pytest.mark.parametrize("family", zoo.MIXTURES)
@torch.no_grad()
def test_the_values_of_all_experts_times_their_keys_are_the_block(family: str) -> None:
    _, entered, keys, output = passed(family)
    layer = zoo.shared(family).feed_forward[-1]
    assert sorted(keys) == [memory.address.expert for memory in layer.memories] and layer.d_ff == sum(layer.sizes)
    joined, bias = torch.cat([keys[number] for number in sorted(keys)], 1), layer.bias(entered)
    assert (bias is not None) == (family == "gpt_oss")
    close(joined @ layer.value.T + (0 if bias is None else bias), output)
    for column in (0, layer.sizes[0], layer.d_ff - 1):
        at, index = layer.at(column)
        memory = next(memory for memory in layer.memories if memory.address == at)
        assert torch.equal(layer.value[:, column], memory.value[:, index])
    with pytest.raises(IndexError):
        layer.at(layer.d_ff)


@torch.no_grad()
def test_mixtral_is_the_sum_of_its_experts_memories_one_by_one() -> None:
    mixture, (x, chosen, weights), _, output = passed("mixtral")
    module = mixture.experts.module
    expected = torch.zeros(24, 32, dtype=torch.float64)
    for token in range(24):
        for expert, g in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = module.gate_up_proj[expert].double().chunk(2)
            for i in range(48):
                z = x[token].double() @ gate[i]
                m = z * torch.sigmoid(z) * (x[token].double() @ up[i])
                expected[token] += g * m * module.down_proj[expert][:, i].double()
    close(mixture.experts.attend(Routed(x, chosen, weights)).double(), expected)
    close(output.double(), expected)


@pytest.mark.parametrize("family", zoo.MIXTURES)
@torch.no_grad()
def test_memories_of_experts_that_were_not_chosen_do_not_fire(family: str) -> None:
    mixture, entered, keys, _ = passed(family)
    weights = mixture.experts.weights(entered)
    assert (weights != 0).sum(1).tolist() == [1 if family == "llama4" else 2] * 24
    for expert in range(len(mixture.experts)):
        silent = weights[:, expert] == 0
        assert silent.any(), "every expert is left out by some token"
        assert not keys[expert][silent].any() and bool(keys[expert][~silent].any(1).all())


@torch.no_grad()
def test_the_router_of_llama4_scales_what_its_experts_receive() -> None:
    mixture, entered, keys, _ = passed("llama4")
    scores, _ = mixture.block.router(entered.x)  # type: ignore[operator]
    torch.testing.assert_close(mixture.experts.weights(entered), scores, rtol=1e-5, atol=1e-6)
    for expert in range(4):
        close(keys[expert], mixture.experts.coefficients(expert, entered.x * scores[:, expert, None]))


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "llama4"])
@torch.no_grad()
def test_keys_of_shared_experts_carry_their_gate(family: str) -> None:
    mixture, entered, keys, _ = passed(family)
    ((number, value),) = mixture.shared.items()
    assert number == len(mixture.experts) == 4
    with capture({0: value}, inputs=True) as plain:
        zoo.shared(family).model(input_ids=IDS)
    gate = torch.sigmoid(mixture.block.shared_expert_gate(entered.x)) if family == "qwen2_moe" else torch.ones(24, 1)
    close(keys[number], gate * plain[0].reshape(24, -1))
    close(mixture.weights(entered)[:, number:], gate)


def test_only_the_experts_that_were_asked_for_are_shown() -> None:
    editable = zoo.shared("qwen2_moe")
    mixture, seen = editable.feed_forward[0].mixture, set()
    assert mixture is not None
    with mixture.watched(lambda expert, *_: seen.add(expert), only=frozenset({1, 4})), torch.no_grad():
        editable.model(input_ids=IDS)
    assert seen == {1, 4}


def test_an_index_behind_the_last_expert_is_none() -> None:
    mixture, (x, chosen, weights), _, _ = passed("mixtral")
    nowhere = Routed(x, torch.full_like(chosen, 4), weights)
    assert mixture.experts.weights(nowhere).shape == (24, 4) and not mixture.experts.weights(nowhere).any()
    assert not mixture.experts.attend(nowhere).any()


def _undeclared() -> nn.Module:
    return nn.Linear(2, 2)


def _normed() -> nn.Module:
    module = zoo.build("mixtral").feed_forward[0].memories[0].module
    module.has_post_expert_norm = True  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(("make", "says"), [(_undeclared, "Linear without has_gate, "), (_normed, "norm after each")])
def test_a_module_that_does_not_declare_its_layout_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        Experts(make())
    assert "\n" not in str(caught.value) and "LAYOUTS" in str(caught.value)
