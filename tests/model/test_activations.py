"""Activations that a pass shows of every layer, and how states are read."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from accelerate import cpu_offload
from torch import Tensor

from ffedit.errors import ModelError
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable, Seen
from ffedit.model.hooks import capture, replace_output

IDS = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])
POST_NORM = "opt-350m"  # its blocks end in a norm
FAMILIES = (*zoo.FAMILIES, POST_NORM)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@functools.cache
def found(family: str) -> Editable:
    if family != POST_NORM:
        return zoo.shared(family)
    config = zoo.model("opt").config
    config.do_layer_norm_before = False
    torch.manual_seed(0)
    return find_and_verify(hf.OPTForCausalLM(config).eval(), zoo.words(), family)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# What was seen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_shows_each_layers_coefficients_output_and_stream(family: str) -> None:
    editable = found(family)
    modules = {memory.address.layer: memory.module for memory in editable.memories.values()}
    layers = dict(enumerate(editable.layers))
    with capture(modules, inputs=True) as keys, capture(modules) as gave, capture(layers) as after, torch.no_grad():
        editable.forward(IDS)
    seen = editable.activations(IDS)
    assert [one.layer for one in seen] == list(range(len(editable.layers)))
    for one in seen:
        assert torch.equal(one.key, keys[one.layer].reshape(2, 5, -1))
        assert torch.equal(one.output, gave[one.layer].reshape(2, 5, -1))
        assert torch.equal(one.after, after[one.layer].reshape(2, 5, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_before_is_the_stream_when_the_layer_adds_nothing(family: str) -> None:
    editable = found(family)
    for one, joint, layer in zip(editable.activations(IDS), editable.residual_adds, editable.layers, strict=True):
        end = {0: layer if joint.norm is None else joint.norm}
        with replace_output(joint.added, torch.zeros_like), capture(end, inputs=joint.norm is not None) as total:
            with torch.no_grad():
                editable.forward(IDS)
            close(one.before, total[0].reshape(2, 5, -1))
        assert (joint.norm is not None) == (family == POST_NORM)
        expected = one.total if joint.norm is None else joint.norm(one.total)
        close(one.after, expected.detach())
        if family in ("gemma2", "gemma3", "olmo2"):
            assert joint.added is not editable.memories[one.layer].module, "what is added went through a norm"
        else:
            assert joint.factor == pytest.approx(0.5 if family == "granite" else 1, rel=1e-4)
            assert torch.equal(one.added, joint.factor * one.output)


def test_a_pass_inside_scaled_shows_what_was_scaled() -> None:
    editable = found("phi3")
    plain = editable.activations(IDS)
    with editable.memories[1].scaled({7: 3.0}):
        turned = editable.activations(IDS)
    assert torch.equal(turned[0].key, plain[0].key)
    assert torch.equal(turned[1].key[..., 7], 3 * plain[1].key[..., 7])


def test_layers_are_shown_as_soon_as_they_are_done_and_nothing_is_left_behind() -> None:
    editable = found("gpt2")

    def hooks() -> list[int]:
        """How many each module has: transformers leaves some of its own."""
        return [len(getattr(module, kind)) for module in editable.model.modules() for kind in HOOKS]

    before = hooks()
    running: list[int] = []
    order: list[tuple[int, int]] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args, number=number: running.append(number))
        for number, layer in enumerate(editable.layers)
    ]
    editable.stream(IDS, lambda one: order.append((one.layer, running[-1])))
    for handle in handles:
        handle.remove()
    assert order == [(number, number) for number in range(len(editable.layers))]
    with pytest.raises(ZeroDivisionError):
        editable.stream(IDS, lambda one: 1 // 0)  # type: ignore[arg-type, return-value]
    assert hooks() == before


def test_a_block_that_does_not_add_is_refused_in_one_line() -> None:
    model = zoo.model("llama")
    for layer in model.model.layers:

        def run(x: Tensor, mlp: Any = layer.mlp, **_: Any) -> Tensor:
            multiplied: Tensor = x * mlp(x)
            return multiplied

        layer.forward = run
    with pytest.raises(ModelError, match="not added to the residual stream") as caught:
        _ = find_and_verify(model, zoo.words(), "m").residual_adds
    assert "\n" not in str(caught.value)


# How states are read --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_state_reads_as_the_models_logits(family: str) -> None:
    editable = found(family)
    logits = editable.read(editable.activations(IDS)[-1].after.flatten(0, 1))
    assert logits.dtype == torch.float32
    with torch.no_grad():
        close(logits.reshape(2, 5, -1), editable.model(input_ids=IDS).logits)
    assert editable.vocabulary == zoo.VOCAB


def test_offloaded_weights_give_the_same() -> None:
    model = zoo.model("phi3")
    cpu_offload(model, execution_device=torch.device("cpu"))
    editable, whole = find_and_verify(model, zoo.words(), "phi3"), found("phi3")
    seen = editable.activations(IDS)
    assert editable.memories[1].weight.is_meta
    assert all(torch.equal(a.before, b.before) for a, b in zip(seen, whole.activations(IDS), strict=True))
    assert torch.equal(editable.read(seen[0].after[0]), whole.read(seen[0].after[0]))
    attended = [one.memories[1].attend(seen[0].after) for one in (editable, whole)]
    assert torch.equal(*attended)


def test_the_stream_before_a_layer_keeps_its_precision() -> None:
    total = torch.tensor([[[1.0, 2.0]]], dtype=torch.bfloat16)
    one = Seen(0, total, total, total / 2, total, total)
    assert one.before.dtype == torch.bfloat16 and torch.equal(one.before, total / 2)
