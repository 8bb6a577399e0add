"""Causal tracing equals a plain loop: one whole forward pass per token, layer and noise sample."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn
from tracing import made

from ffedit.errors import FactError, ModelError
from ffedit.facts.fact import Fact
from ffedit.inference.generation import continuations
from ffedit.locator import Trace, TraceSet, aggregate, locate, locate_all, site_of
from ffedit.locator.result import subject_peak
from ffedit.model.editable import Editable

FACT = Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
LONG = Fact("Leo Tolstoy", "{} wrote", target="the piano", previous="the big old Anna Karenina", neighbors=())
FACTS = [
    FACT,
    Fact("Anna Karenina", "Leo Tolstoy wrote {}", target="Rome", previous="in"),  # the subject ends the prompt
    Fact("Rome", "Rome and the old Rome is in", target="Spain", previous="Italy", occurrence=1),
]
SAMPLES, SEED = 2, 7


class Reference:
    """The definitions, word by word: every number comes from passes of the whole model, one row at a time."""

    def __init__(self, editable: Editable, fact: Fact, seed: int = SEED) -> None:
        self.editable = editable
        prompt, whole = (editable.tokenizer(text)["input_ids"] for text in (fact.text, f"{fact.text} {fact.previous}"))
        self.ids, self.prompt = whole, len(prompt)
        before = editable.tokenizer(fact.text[: fact.span[0]].rstrip())["input_ids"]
        self.first = len(before)
        self.end = self.first + len(fact.subject.split())
        with torch.no_grad():
            self.embeddings = editable.embedding(torch.arange(zoo.VOCAB))
        draws = torch.randn(SAMPLES, self.end - self.first, zoo.WIDTH, generator=torch.Generator().manual_seed(seed))
        self.noise = 3 * self.embeddings.std() * draws
        blocks = {("state", i): block for i, block in enumerate(editable.layers)}
        parts = {
            (part, i): module
            for part in ("feed_forward", "attention")[: 1 + bool(editable.attention)]
            for i, module in enumerate(editable.outputs_of(part))
        }
        self.modules: dict[Any, nn.Module] = {**blocks, **parts}
        self.kept: dict[Any, Tensor] = {}
        self.clean = self.run(None, [], 0, keep="clean")
        self.corrupted = float(np.mean([self.run(s, [], 0, keep=s) for s in range(SAMPLES)]))

    def run(
        self, sample: int | None, restored: list[Any], position: int, keep: Any = None, sever: str | None = None
    ) -> float:
        """Probability of the whole answer with noise `sample`, modules `restored` to clean at `position`.

        With `sever`, all other modules of that part give at `position` what they gave with the noise alone. What every
        module gives is kept under the name `keep`.
        """

        def embed(_: Any, __: Any, output: Tensor) -> Tensor:
            output = output.clone()
            if sample is not None:
                output[0, self.first : self.end] += self.noise[sample]
            return output

        def hook(name: Any) -> Any:
            def change(_: Any, __: Any, output: Any) -> Any:
                tensor = (output[0] if isinstance(output, tuple) else output).clone()
                flat = tensor.view(-1, tensor.shape[-1])
                if keep is not None:
                    self.kept[keep, name] = flat.clone()
                elif name in restored:
                    flat[position] = self.kept["clean", name][position]
                elif name[0] == sever:
                    flat[position] = self.kept[sample, name][position]
                return (tensor, *output[1:]) if isinstance(output, tuple) else tensor

            return change

        with ExitStack() as stack, torch.no_grad():
            for handle in [
                self.editable.embedding.register_forward_hook(embed),
                *(module.register_forward_hook(hook(name)) for name, module in self.modules.items()),
            ]:
                stack.callback(handle.remove)
            logits = self.editable.model(input_ids=torch.tensor([self.ids]), use_cache=False).logits[0].double()
        log_probs = logits.log_softmax(-1)
        return math.exp(sum(float(log_probs[p - 1, self.ids[p]]) for p in range(self.prompt, len(self.ids))))

    def effects(self, kind: str, window: int = 1, sever: str | None = None) -> np.ndarray[Any, Any]:
        found = np.zeros((zoo.DEPTH, self.prompt))
        for layer in range(zoo.DEPTH):
            if kind == "state":
                layers = range(layer, layer + 1)
            else:  # DESIGN.md: layers max(0, l − w//2) up to min(L, l + ceil(w/2)) − 1
                layers = range(max(0, layer - window // 2), min(zoo.DEPTH, layer + math.ceil(window / 2)))
            for position in range(self.prompt):
                restored = [(kind, i) for i in layers]
                runs = [self.run(s, restored, position, sever=sever) for s in range(SAMPLES)]
                found[layer, position] = np.mean(runs)
        return found - self.corrupted


def agrees(trace: Trace, reference: Reference, window: int = 1) -> None:
    assert trace.clean == pytest.approx(reference.clean, rel=1e-4, abs=1e-6)
    assert trace.corrupted == pytest.approx(reference.corrupted, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(trace.effects, reference.effects(trace.kind, window, trace.sever), atol=1e-5)
    assert trace.subject == (reference.first, reference.end)


EVERY = [*zoo.FAMILIES, *zoo.HYBRIDS, *zoo.MIXTURES]


@pytest.mark.parametrize("family", EVERY)
def test_a_trace_equals_the_plain_loop(family: str) -> None:
    editable = zoo.shared(family)
    assert editable.resumable == (family not in zoo.HYBRIDS)
    reference = Reference(editable, FACT)
    settings: list[tuple[Any, Any]] = [("state", None), ("feed_forward", None)]
    if editable.attention:
        settings += [("attention", None), ("state", "feed_forward"), ("state", "attention")]
    for kind, sever in settings:
        trace = locate(editable, FACT, kind, samples=SAMPLES, seed=SEED, window=2, sever=sever)
        agrees(trace, reference, 2)
        assert np.abs(trace.effects).max() > 1e-4, "a trace of zeros would agree with anything"


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "llama"])
@pytest.mark.parametrize("kind", ["feed_forward", "attention"])
def test_outputs_are_restored_while_a_part_is_severed(family: str, kind: Any) -> None:
    editable = zoo.shared(family)
    reference = Reference(editable, FACT)
    for sever in ("feed_forward", "attention"):
        agrees(locate(editable, FACT, kind, samples=SAMPLES, seed=SEED, window=2, sever=sever), reference, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("fact", FACTS, ids=["middle", "end", "second"])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("kind", "window"), [("state", 1), ("feed_forward", 1), ("feed_forward", 3)])
def test_traces_agree_with_the_reference_for_any_subject_position_window_and_bos(
    fact: Fact, bos: bool, kind: Any, window: int
) -> None:
    editable = zoo.shared("gpt_neo", bos)
    trace = locate(editable, fact, kind, samples=SAMPLES, seed=SEED, window=window)
    agrees(trace, Reference(editable, fact), window)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "llama"])
def test_an_answer_of_several_tokens_counts_whole(family: str) -> None:
    editable = zoo.shared(family)
    reference = Reference(editable, LONG)
    assert len(reference.ids) - reference.prompt == 5
    for kind in ("state", "feed_forward"):
        trace = locate(editable, LONG, kind, samples=SAMPLES, seed=SEED, window=2)  # type: ignore[arg-type]
        assert trace.clean == pytest.approx(reference.clean, rel=1e-4) and trace.answer == LONG.previous
        expected = reference.effects(kind, 2)
        np.testing.assert_allclose(trace.effects, expected, atol=1e-4 * np.abs(expected).max())


def test_the_layer_to_edit_lies_in_the_window_that_brings_back_most() -> None:
    for family, window in (("gpt2", 1), ("gpt2", 2), ("llama", 2)):
        trace = locate(zoo.shared(family), FACT, samples=SAMPLES, window=window)
        best = int(trace.at_subject.argmax())
        assert max(0, best - window // 2) <= trace.layer < min(zoo.DEPTH, best + math.ceil(window / 2))


def test_a_model_that_cannot_be_resumed_is_traced_all_the_same() -> None:
    slow = dataclasses.replace(zoo.shared("llama"), resumable=False)
    for kind in ("state", "feed_forward"):
        fast = locate(zoo.shared("llama"), FACT, kind, samples=SAMPLES)
        np.testing.assert_allclose(locate(slow, FACT, kind, samples=SAMPLES).effects, fast.effects, atol=1e-6)


def test_the_previous_object_is_traced_and_never_the_target() -> None:
    editable = zoo.shared("llama")
    trace = locate(editable, FACT, samples=1)
    assert trace.answer == "Paris"
    without = [locate(editable, Fact(FACT.subject, FACT.prompt, t), samples=1) for t in ("Rome", "Paris", None)]
    said = continuations(editable, [editable.tokenizer(FACT.text)["input_ids"]], 1)[0]
    assert {t.answer for t in without} == {editable.tokenizer.decode(said)} and all(t.known for t in without)
    assert not trace.known
    own = Fact(FACT.subject, FACT.prompt, "Rome", previous=without[0].answer)
    assert locate(editable, own, samples=1).known


def test_a_trace_says_which_tokens_it_is_about() -> None:
    trace = locate(zoo.shared("gpt2", True), FACT, samples=1)
    assert trace.tokens == ("<s>", "the", "Eiffel", "tower", "is", "located", "in")
    assert trace.effects.shape == (zoo.DEPTH, len(trace.tokens)) and trace.subject_last == 3
    assert np.array_equal(trace.at_subject, trace.effects[:, 3])


def test_the_model_is_as_before_and_progress_reaches_its_end() -> None:
    editable = zoo.build("gpt2")
    before, seen = zoo.snapshot(editable), []
    locate_all(editable, FACTS, samples=1, progress=lambda *step: seen.append(step))
    assert zoo.unchanged(editable, before) and seen[-1][1] == seen[-1][2] > 0
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in editable.model.modules())


def test_numbers_that_are_not_finite_on_a_prompt_are_refused() -> None:
    editable = zoo.build("llama")
    with torch.no_grad():
        editable.embedding.weight[editable.tokenizer("tower")["input_ids"][0], 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        locate(editable, FACT, samples=1)


@pytest.mark.parametrize("kind", ["state", "feed_forward"])
def test_some_layers_are_traced_as_among_all(kind: Any) -> None:
    editable = zoo.trained("gpt2", True)
    whole, some = (locate(editable, FACT, kind, samples=SAMPLES, layers=layers) for layers in (None, [2, 1]))
    np.testing.assert_allclose(some.effects[1:], whole.effects[1:], atol=1e-6)
    np.testing.assert_allclose(some.errors[1:], whole.errors[1:], atol=1e-6)
    assert np.isnan(some.effects[0]).all() and np.isnan(some.errors[0]).all() and np.isnan(some.alone[0])
    assert some.layer in (1, 2) and not np.isnan(whole.effects).any()
    assert site_of(TraceSet((some,))) in (1, 2, None)


@pytest.mark.parametrize("kind", ["state", "feed_forward"])
@pytest.mark.parametrize("tokens", ["subject_last", "subject_and_last"])
@pytest.mark.parametrize("fact", FACTS, ids=["middle", "end", "second"])
def test_some_tokens_are_traced_as_among_all(fact: Fact, tokens: Any, kind: Any) -> None:
    editable = zoo.trained("gpt2", True)
    whole, some = (locate(editable, fact, kind, samples=SAMPLES, tokens=of) for of in ("all", tokens))
    start, end = whole.subject
    traced = [end - 1] if tokens == "subject_last" else [*range(start, end), len(whole.tokens) - 1]
    for measured, expected in ((some.effects, whole.effects), (some.errors, whole.errors)):
        np.testing.assert_allclose(measured[:, traced], expected[:, traced], atol=1e-6)
        others = np.delete(measured, traced, axis=1)
        assert others.size and np.isnan(others).all() and not np.isnan(expected).any()
    if kind != "state":
        np.testing.assert_allclose(some.alone, whole.alone, atol=1e-6)
    assert site_of(some) == site_of(whole) and some.layer == whole.layer and some._repr_html_()
    with pytest.raises(FactError, match="only some layers or tokens were traced"):
        aggregate(TraceSet((some,)))


def test_a_subject_of_one_token_at_the_start_is_traced() -> None:
    """Of a prompt without a start token, nothing stands left of it; of a prompt that it is, no token is between."""
    for prompt, length in (("{} is in", 3), ("{}", 1)):
        fact = Fact("Rome", prompt, previous="Italy")
        whole, some = (
            locate(zoo.shared("gpt2"), fact, samples=SAMPLES, tokens=tokens) for tokens in ("all", "subject_and_last")
        )
        assert whole.subject == (0, 1) and len(whole.tokens) == length
        traced = sorted({0, length - 1})
        np.testing.assert_allclose(some.effects[:, traced], whole.effects[:, traced], atol=1e-6)
        peak, best = subject_peak(some), float(whole.effects[:, 0].max())
        assert peak.last and peak.effect == pytest.approx(best, abs=1e-6)


def test_the_largest_effect_at_the_subject_is_sought_at_all_its_tokens() -> None:
    effects = np.zeros((3, 5))
    effects[1, 1], effects[2, 2], effects[0, 4] = 0.5, 0.1, 0.7
    early = made(effects, (1, 3))
    assert subject_peak(early) == (" t1", False, 1, 0.5) and "recalled most at ' t1', layer 1: 0.50" in repr(early)
    assert subject_peak(TraceSet((early, early))) == ("first subject", False, 1, 0.5)
    single = made(effects[:, 2:], (0, 1))
    assert subject_peak(TraceSet((early, single))) == ("first subject", False, 1, 0.5), "the only fact with this role"
    assert subject_peak(TraceSet((single, single))) == ("last subject", True, 2, 0.1)


def test_what_cannot_be_traced_is_refused() -> None:
    editable = zoo.trained("gpt2", True)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"window": count}, str(count)) for count in (0, -1, 4)),
        ({"samples": 0}, "0"),
        *(
            ({name: value}, f"{value!r} is not known; known are")
            for name, value in {"tokens": "last", "kind": "mlp", "metric": "rank", "sever": "norm"}.items()
        ),
        *(({"layers": layers}, "layers 0 to 2") for layers in ([], [3], [-1, 0])),
    ]
    for settings, told in refused:
        with pytest.raises(FactError, match=told):
            locate(editable, FACT, **settings)
    with pytest.raises(FactError, match="only some layers or tokens were traced"):
        aggregate(TraceSet((locate(editable, FACT, samples=1, layers=[1]),)))
