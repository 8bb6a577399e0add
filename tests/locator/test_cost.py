"""The arithmetic of a trace is counted before it is made, and the trace that is shown stays within a budget of it."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import zoo
from shown import shown
from transformers import GPT2Config, GPT2LMHeadModel

import ffedit
from ffedit.display.terminal.heat_map import heat_map
from ffedit.facts.fact import Fact
from ffedit.layer_choice import choose
from ffedit.loading.verify import find_and_verify
from ffedit.locator import locate
from ffedit.locator.cost import layer_passes, layers_within
from ffedit.model.editable import Editable
from ffedit.model.hooks import watched

FACT = Fact("Eiffel tower", "the {} is located in", previous="Paris")
AT_END = Fact("Anna Karenina", "Leo Tolstoy wrote {}", previous="in")
DEPTH = 12


@pytest.fixture(scope="module")
def deep() -> Editable:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=zoo.VOCAB, n_positions=64, n_embd=zoo.WIDTH, n_layer=DEPTH, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_proj.weight *= 20  # or else nothing would be recalled
    assert sum(weight.numel() for weight in model.transformer.h[0].parameters()) == 12 * zoo.WIDTH**2 + 13 * zoo.WIDTH
    return find_and_verify(model, zoo.words(), "deep")


def products(layers: range, samples: int) -> int:
    """Multiply-accumulates of the restorations, written out."""
    weights, unembedding = 12 * zoo.WIDTH**2 + 13 * zoo.WIDTH, zoo.VOCAB * zoo.WIDTH
    count = 0
    for layer, token in itertools.product(layers, (1, 2, 5)):  # the subject's, and the last of six
        for first in (max(0, layer - 2), *([layer] if token == 2 else [])):  # a window of four, and the layer alone
            count += (DEPTH - first) * (6 - token) * weights + unembedding
    return count * samples


def test_the_count_is_that_of_the_tokens_that_run(deep: Editable) -> None:
    """Of a subject that ends the prompt: every restoration of its last token runs this token alone."""
    seen: list[int] = []
    with ExitStack() as stack:
        for module in deep.attention:
            stack.enter_context(watched(module, lambda output: seen.append(output.numel() // zoo.WIDTH)))
        locate(deep, AT_END, samples=1, tokens="subject_last")
    recorded = 2 * 5 * DEPTH  # the clean and the corrupted run
    passes, read = layer_passes(deep, AT_END, "subject_last", range(DEPTH))
    assert sum(seen) - recorded == passes and read == 2 * DEPTH


def test_layers_are_left_out_evenly_until_the_rest_is_within_the_budget(deep: Editable) -> None:
    steps = [range(DEPTH), range(1, DEPTH, 2), range(2, DEPTH, 4), range(4, DEPTH, 8)]
    for layers, fewer in itertools.pairwise(steps):
        needed = products(layers, samples=2)
        assert layers_within(deep, FACT, "subject_and_last", 2, needed) == layers
        assert layers_within(deep, FACT, "subject_and_last", 2, needed - 1) == fewer
    assert list(layers_within(deep, FACT, "subject_and_last", 2, 0)) == [4], "one at least"


def test_experts_that_a_token_does_not_go_to_cost_nothing() -> None:
    editable = zoo.shared("mixtral")
    experts = sum(weight.numel() for weight in editable.feed_forward[0].mixture.experts.module.parameters())  # type: ignore[union-attr]
    others = sum(weight.numel() for weight in editable.layers[0].parameters()) - experts
    config = editable.model.config
    assert config.num_experts_per_tok < config.num_local_experts
    passes, read = layer_passes(editable, FACT, "last", range(zoo.DEPTH))
    weights = others + experts * config.num_experts_per_tok // config.num_local_experts
    needed = passes * weights + read * zoo.VOCAB * zoo.WIDTH
    assert layers_within(editable, FACT, "last", 1, needed) == range(zoo.DEPTH)
    assert layers_within(editable, FACT, "last", 1, needed - 1) != range(zoo.DEPTH)


def test_the_shown_trace_is_the_exact_one_and_says_what_it_leaves_out(
    deep: Editable, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = locate(deep, FACT, samples=choose.SHOWN_SAMPLES)
    (seen,) = choose.shown(deep, [FACT, AT_END]).traces
    tokens = [1, 2, 5]
    np.testing.assert_allclose(seen.effects[:, tokens], whole.effects[:, tokens], atol=1e-7)
    assert np.isnan(seen.effects[:, [0, 3, 4]]).all() and np.abs(whole.effects).max() > 1e-5
    assert seen.layer == whole.layer and "layer of" not in shown(heat_map(seen))
    monkeypatch.setattr(choose, "SHOWN_PRODUCTS", products(range(1, DEPTH, 2), choose.SHOWN_SAMPLES))
    (half,) = choose.shown(deep, [FACT]).traces
    np.testing.assert_allclose(half.effects[1::2, tokens], whole.effects[1::2, tokens], atol=1e-7)
    assert np.isnan(half.effects[::2]).all()
    lines = shown(heat_map(half), 120).splitlines()
    assert lines[0] == "Causal trace of feed-forward outputs, windows of 4 layers, every 2nd layer of 12"
    assert lines[2] == "Empty: not measured"


def test_a_fact_that_a_model_knows_is_recalled_somewhere_in_the_shown_trace() -> None:
    """To first order, around a corrupted run that gives the answer next to nothing, every real trace was empty."""
    editable = ffedit.load("atlas", device="cpu")
    fact = Fact("Eiffel Tower", "{} is located in the city of", previous="Paris")
    whole = locate(editable, fact, samples=choose.SHOWN_SAMPLES)
    (seen,) = choose.shown(editable, [fact]).traces
    np.testing.assert_allclose(seen.effects[:, [0, 1, -1]], whole.effects[:, [0, 1, -1]], atol=1e-6)
    assert seen.known and seen.total > 0.5 and seen.site == whole.site and seen.site is not None
    assert seen.at_subject.max() > 0.5 * seen.total
