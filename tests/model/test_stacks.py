"""What every layer saw and how states are read, for decoders, encoders and both halves of encoder–decoders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import halves
import pytest
import torch
import transformers as hf
import zoo
from accelerate import cpu_offload
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.inference import replay
from ffedit.loading.verify import find_and_verify, find_stacks
from ffedit.model.editable import Editable, Seen, Stack
from ffedit.model.hooks import capture, replace_output

IDS = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])
BOTH = {**dict.fromkeys(halves.ENCODERS, ("encoder",)), **dict.fromkeys(halves.PAIRS, ("encoder", "decoder"))}
CASES = [("decoder", name) for name in zoo.FAMILIES] + [(half, name) for name in BOTH for half in BOTH[name]]
UNEMBEDDED = [(half, name) for half, name in CASES if half == "decoder" or name in halves.ENCODERS]
ENDS_IN_NORM = {"bert", "roberta", "distilbert", "electra", "bart", "marian"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@functools.cache
def found(family: str) -> dict[str, Stack]:
    if family in zoo.FAMILIES:
        return {"decoder": zoo.shared(family)}
    return {stack.kind: stack for stack in find_stacks(halves.model(family), zoo.words(), family)}


def whole(stack: Stack) -> Tensor:
    """The model's own logits of `IDS`, both halves reading them."""
    pair = {"decoder_input_ids": IDS} if stack.model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: Tensor = stack.model(input_ids=IDS, **pair).logits
    return logits


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# What was seen ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("half", "family"), CASES)
def test_a_pass_shows_each_layers_coefficients_output_and_stream(half: str, family: str) -> None:
    stack = found(family)[half]
    modules = {memory.address.layer: memory.module for memory in stack.memories.values()}
    layers = dict(enumerate(stack.layers))
    with capture(modules, inputs=True) as keys, capture(modules) as gave, capture(layers) as after, torch.no_grad():
        stack.forward(IDS)
    seen = stack.activations(IDS)
    assert [one.layer for one in seen] == list(range(len(stack.layers)))
    for one in seen:
        assert torch.equal(one.key, keys[one.layer].reshape(2, 5, -1))
        assert torch.equal(one.output, gave[one.layer].reshape(2, 5, -1))
        assert torch.equal(one.after, after[one.layer].reshape(2, 5, -1))


@pytest.mark.parametrize(("half", "family"), CASES)
def test_before_is_the_stream_when_the_layer_adds_nothing(half: str, family: str) -> None:
    stack = found(family)[half]
    for one, joint, layer in zip(stack.activations(IDS), stack.residual_adds, stack.layers, strict=True):
        end = {0: layer if joint.norm is None else joint.norm}
        with replace_output(joint.added, torch.zeros_like), capture(end, inputs=joint.norm is not None) as total:
            with torch.no_grad():
                stack.forward(IDS)
            close(one.before, total[0].reshape(2, 5, -1))
        assert (joint.norm is not None) == (family in ENDS_IN_NORM)
        expected = one.total if joint.norm is None else joint.norm(one.total)
        close(one.after, expected.detach())
        if family in ("gemma2", "gemma3", "olmo2"):
            assert joint.added is not stack.memories[one.layer].module, "what is added went through a norm"
        else:
            assert joint.factor == pytest.approx(0.5 if family == "granite" else 1, rel=1e-4)
            assert torch.equal(one.added, joint.factor * one.output)


@pytest.mark.parametrize(("half", "family"), [case for case in CASES if case[1] in BOTH])
def test_attention_over_the_memories_of_an_encoder_or_a_pair_is_the_layer(half: str, family: str) -> None:
    stack = found(family)[half]
    firsts = {memory.address.layer: memory.key_rows.first for memory in stack.memories.values()}
    with capture(firsts, inputs=True) as x, torch.no_grad():
        stack.forward(IDS)
    for one, memory in zip(stack.activations(IDS), stack.memories.values(), strict=True):
        close(memory.coefficients(x[one.layer]).reshape(2, 5, -1), one.key)
        close(memory.attend(x[one.layer]).reshape(2, 5, -1), one.output)


def test_a_pass_inside_scaled_shows_what_was_scaled() -> None:
    stack = found("bart")["encoder"]
    plain = stack.activations(IDS)
    with stack.memories[1].scaled({7: 3.0}):
        turned = stack.activations(IDS)
    assert torch.equal(turned[0].key, plain[0].key)
    assert torch.equal(turned[1].key[..., 7], 3 * plain[1].key[..., 7])


@pytest.mark.parametrize(("half", "family"), [("decoder", "gpt2"), ("encoder", "bert"), ("decoder", "t5")])
def test_layers_are_shown_as_soon_as_they_are_done_and_nothing_is_left_behind(half: str, family: str) -> None:
    stack = found(family)[half]

    def hooks() -> list[int]:
        """How many each module has: transformers leaves some of its own."""
        return [len(getattr(module, kind)) for module in stack.model.modules() for kind in HOOKS]

    before = hooks()
    running: list[int] = []
    order: list[tuple[int, int]] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args, number=number: running.append(number))
        for number, layer in enumerate(stack.layers)
    ]
    stack.stream(IDS, lambda one: order.append((one.layer, running[-1])))
    for handle in handles:
        handle.remove()
    assert order == [(number, number) for number in range(len(stack.layers))]
    with pytest.raises(ZeroDivisionError):
        stack.stream(IDS, lambda one: 1 // 0)  # type: ignore[arg-type, return-value]
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


@pytest.mark.parametrize(
    ("half", "family"), [case for case in CASES if case not in {("encoder", p) for p in halves.PAIRS}]
)
def test_the_last_state_reads_as_the_models_logits(half: str, family: str) -> None:
    stack = found(family)[half]
    logits = stack.read(stack.activations(IDS)[-1].after.flatten(0, 1))
    assert logits.dtype == torch.float32
    close(logits.reshape(2, 5, -1), whole(stack))
    assert stack.vocabulary == zoo.VOCAB


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_decoder_reads_as_reruns_do(family: str) -> None:
    stack, states = found(family)["decoder"], torch.randn(7, zoo.WIDTH)
    assert torch.equal(stack.read(states), replay.logits_of(zoo.shared(family), states))


@pytest.mark.parametrize("family", halves.PAIRS)
def test_the_encoder_of_a_pair_reads_through_its_own_norm_and_the_shared_unembedding(family: str) -> None:
    stack, states = found(family)["encoder"], torch.randn(7, zoo.WIDTH)
    model, final = stack.model, states
    if family.startswith("t5"):
        norm = model.encoder.final_layer_norm.weight
        final = states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm
        expected = final @ model.lm_head.weight.T * (zoo.WIDTH**-0.5 if family == "t5" else 1)
        assert stack.norm == "encoder.final_layer_norm"
    else:
        if family == "mbart":
            final = model.model.encoder.layer_norm(states)
            assert stack.norm == "model.encoder.layer_norm"
        else:
            assert stack.norm == ""
        expected = final @ model.model.shared.weight.T + model.final_logits_bias
    close(stack.read(states), expected.detach())


def test_bert_reads_through_its_masked_language_head() -> None:
    stack, states = found("bert")["encoder"], torch.randn(7, zoo.WIDTH)
    head = stack.model.cls.predictions
    hidden = head.transform.LayerNorm(nn.functional.gelu(head.transform.dense(states)))
    expected = hidden @ stack.model.bert.embeddings.word_embeddings.weight.T + head.bias
    close(stack.read(states), expected.detach())


def test_an_encoder_without_a_head_runs_but_does_not_read() -> None:
    model = hf.BertModel(halves.model("bert").config).eval()
    (stack,) = find_stacks(model, zoo.words(), "bert")
    assert len(stack.activations(IDS)) == 2
    for ask in (lambda: stack.read(torch.zeros(1, zoo.WIDTH)), lambda: stack.unembedding):
        with pytest.raises(ModelError, match="BertModel has no unembedding"):
            ask()


# Which stacks there are -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", BOTH)
def test_all_stacks_are_found_with_their_memories(family: str) -> None:
    by_name = found(family)
    assert tuple(by_name) == BOTH[family]
    bart = family in ("bart", "marian", "mbart")
    for name, stack in by_name.items():
        assert len(stack.layers) == len(stack.memories) == (3 if bart and name == "decoder" else 2)
        assert stack.max_tokens == (512 if family.startswith("t5") else 64)
        for layer, memory in enumerate(stack.memories.values()):
            assert memory.address.layer == layer
            assert list(memory.shape) == [zoo.WIDTH, 40 if bart and name == "decoder" else 48]
            gated = family in ("t5_gated", "modernbert")
            assert memory.key_rows.gated == gated


def test_a_causal_decoder_is_its_only_stack() -> None:
    (stack,) = find_stacks(zoo.model("gpt2"), zoo.words(), "gpt2")
    assert stack.kind == "decoder" and len(stack.memories) == zoo.DEPTH
    assert isinstance(stack, Editable)


@pytest.mark.parametrize("family", ["bert", "roberta", "t5", "bart"])
def test_padding_that_is_masked_changes_nothing(family: str) -> None:
    stack = found(family)["encoder"]
    padded = torch.cat([IDS, torch.full((2, 3), 50)], 1)
    mask = torch.cat([torch.ones(2, 5), torch.zeros(2, 3)], 1).long()
    close(stack.activations(padded, mask)[-1].key[:, :5], stack.activations(IDS)[-1].key)
    assert not torch.allclose(stack.activations(padded)[-1].key[:, :5], stack.activations(IDS)[-1].key, atol=1e-2)


@pytest.mark.parametrize("family", halves.PAIRS)
def test_a_decoder_of_a_pair_reads_the_source_it_is_given(family: str) -> None:
    stack = found(family)["decoder"]
    beside_itself, other = stack.activations(IDS)[-1].key, stack.activations(IDS, source=IDS.flip(0))[-1].key
    assert torch.equal(stack.activations(IDS, source=IDS)[-1].key, beside_itself)
    assert not torch.allclose(other, beside_itself, atol=1e-2)


def refusal(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        find_stacks(model, zoo.words(), "some/model")
    assert str(caught.value).startswith("some/model: ") and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_has_no_layers_of_its_own_kind_is_refused() -> None:
    assert "found Linear" in refusal(nn.Linear(2, 2))
    config = hf.AlbertConfig(
        vocab_size=97,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    assert "value matrix" in refusal(hf.AlbertForMaskedLM(config).eval())


@pytest.mark.parametrize("spoil", ["nan", "meta"])
def test_an_unsound_encoder_is_refused(spoil: str) -> None:
    model = halves.model("bert")
    if spoil == "meta":
        assert "meta" in refusal(model.to("meta"))
    else:
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.weight[3, 4] = float("nan")
        assert "not finite" in refusal(model)


def test_a_value_matrix_that_does_more_than_multiply_is_refused() -> None:
    model = halves.model("t5")
    wo = model.encoder.block[1].layer[1].DenseReluDense.wo
    forward: Callable[[Tensor], Tensor] = wo.forward
    wo.forward = lambda x: forward(x) + x.sum()
    assert "encoder.block.1" in refusal(model)


@pytest.mark.parametrize("family", ["phi3", "bert", "t5"])
def test_offloaded_weights_give_the_same(family: str) -> None:
    model = zoo.model(family) if family in zoo.FAMILIES else halves.model(family)
    cpu_offload(model, execution_device=torch.device("cpu"))
    for stack in find_stacks(model, zoo.words(), family):
        whole, seen = found(family)[stack.kind], stack.activations(IDS)
        assert stack.memories[1].weight.is_meta
        assert all(torch.equal(a.before, b.before) for a, b in zip(seen, whole.activations(IDS), strict=True))
        assert torch.equal(stack.read(seen[0].after[0]), whole.read(seen[0].after[0]))
        attended = [one.memories[1].attend(seen[0].after) for one in (stack, whole)]
        assert torch.equal(*attended)


def test_the_stream_before_a_layer_keeps_its_precision() -> None:
    total = torch.tensor([[[1.0, 2.0]]], dtype=torch.bfloat16)
    one = Seen(0, total, total, total / 2, total, total)
    assert one.before.dtype == torch.bfloat16 and torch.equal(one.before, total / 2)
