"""Seconds and memory of an edit, estimated before it is made from a forward pass that is measured.

Almost all of an edit's time is spent in the model. Each stage is counted in tokens that pass through all of its layers:
a run that begins at layer l counts for its share of the depth, and a gradient for two further passes. A pass over a
batch and one over a single token are timed; the second is what a generated token takes. The equations take about
`SOLVING` d_ff³ operations in float64, at the speed of a Cholesky factorisation that is timed as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import psutil
import torch

from ffedit.editor.config import EditConfig
from ffedit.editor.methods import METHODS
from ffedit.editor.statistics import in_cache
from ffedit.evaluator.drift import DRIFT_ROWS, DRIFT_TOKENS
from ffedit.evaluator.generations import TEXT_TOKENS
from ffedit.evaluator.prompts import questions
from ffedit.facts.fact import Fact, by_subject
from ffedit.facts.text import counted
from ffedit.inference import replay
from ffedit.inference.corpus import Corpus
from ffedit.inference.precision import least_seconds
from ffedit.layer_choice.choose import SHOWN_PRODUCTS, SHOWN_SAMPLES, SHOWN_TOKENS
from ffedit.layer_choice.published import auto_layer
from ffedit.locator.cost import layer_passes, layers_within
from ffedit.model.editable import Editable
from ffedit.model.memory import KeyValueMemory

ROWS, TOKENS, FACTORED = 16, 32, 512  # of the batch that is timed; size of the matrix that is factored
USUAL_STEPS, SOLVING = 8, 1  # steps that most values take at the default numbers; operations to solve, in d_ff³
USUAL_MORE = 2  # steps that most take in each further round
WITH_GRADIENT = 3  # a pass with its gradient takes about three passes
RUNS = 10  # corrupted runs of a trace that decides


@dataclass(frozen=True)
class Stage:
    """One stage of an edit."""

    name: str  # locate, statistics, edit or evaluate
    words: str  # what is done
    tokens: int  # that pass through the model's layers, a share of these counting as such
    seconds: float  # estimated
    longest: float | None = None  # seconds if no value is found before the last step; None where it does not matter


@dataclass(frozen=True)
class Estimate:
    """Stages of an edit, the speed that was measured, and memory in bytes: the process now, and at most."""

    stages: tuple[Stage, ...]
    tokens_per_second: float
    memory_now: int
    memory_most: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**asdict(self), "seconds": self.seconds, "longest": self.longest}

    @property
    def seconds(self) -> float:
        """Sum over the stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def longest(self) -> float:
        """Sum over the stages, if no value is found before the last step."""
        return sum(stage.seconds if stage.longest is None else stage.longest for stage in self.stages)


def estimate(
    editable: Editable,
    facts: Sequence[Fact],
    method: str,
    layer: int | None,
    spread: int,
    config: EditConfig,
    text: Corpus | None,
    show_trace: bool,
) -> Estimate:
    """Estimate what `ffedit apply` would take, from timed passes of the model; nothing is edited.

    `layer` is the highest of the `spread` layers to edit; None if it is still to be chosen by the facts' traces. `text`
    is for the key statistics; None where these were collected before. Where the layer is known, the first fact is
    traced only to `show_trace`.
    """
    costs = _Costs(editable, facts, config)
    top = auto_layer(editable, method).layer if layer is None else layer
    layers = range(max(0, top + 1 - spread), top + 1)
    stages = [costs.choosing() if layer is None else costs.tracing(layer, show_trace)]
    if METHODS[method].statistics and text is not None:
        stages.append(costs.collecting(layers, text))
    stages += [costs.editing(layers, method), costs.evaluating()]
    now = psutil.Process().memory_info().rss
    return Estimate(tuple(stages), 1 / costs.per_token, now, now + costs.matrices(layers))


class _Costs:
    """Costs of each stage of an edit, from what is timed when this is made."""

    def __init__(self, editable: Editable, facts: Sequence[Fact], config: EditConfig) -> None:
        self.editable, self.facts, self.config = editable, facts, config
        self.depth = len(editable.layers)
        self.length = fmean(len(editable.encode(fact.text, fact.new_object, fact.span).ids) for fact in facts)
        self.per_token = least_seconds(lambda: _run(editable, ROWS, TOKENS)) / (ROWS * TOKENS)
        self.generated = least_seconds(lambda: _run(editable, 1, 1))
        matrix = torch.eye(FACTORED, dtype=torch.float64)
        self.operation = least_seconds(lambda: torch.linalg.cholesky(matrix)) / (FACTORED**3 / 3)

    def choosing(self) -> Stage:
        """Estimate the traces of all facts at all layers."""
        count = len(self.facts)
        tokens = count * RUNS * self.depth * self.length**2 / 2
        return self._stage("locate", f"choose the layer: trace {counted(count, 'fact')}", tokens)

    def tracing(self, layer: int, show_trace: bool) -> Stage:
        """Estimate the trace of the first fact, where there is one to show."""
        if not show_trace:
            return self._stage("locate", f"layer {layer}", 0)
        fact = self.facts[0]
        layers = layers_within(self.editable, fact, SHOWN_TOKENS, SHOWN_SAMPLES, SHOWN_PRODUCTS)
        passes, _ = layer_passes(self.editable, fact, SHOWN_TOKENS, layers)
        words = f"layer {layer}; trace the first fact"
        tokens = self.length * (1 + SHOWN_SAMPLES) + SHOWN_SAMPLES * passes / self.depth
        return self._stage("locate", words, tokens)

    def collecting(self, layers: Sequence[int], text: Corpus) -> Stage:
        """Estimate the key statistics of `layers`."""
        memories = self._memories(layers)
        if len(in_cache(self.editable, memories, text)) == len(memories):
            return self._stage("statistics", "read from the cache", 0)
        share = (1 + layers[-1]) / self.depth
        return self._stage("statistics", f"the keys of {text.tokens:,} tokens", text.tokens * share)

    def editing(self, layers: Sequence[int], method: str) -> Stage:
        """Estimate the values and the equations."""
        count, most = len(by_subject(self.facts)), self.config.value.steps
        steps, top = min(USUAL_STEPS, most), layers[-1]
        again = self.config.value.rounds_of(1 if METHODS[method].one_by_one else count) - 1
        solving = SOLVING * self.operation * sum(memory.d_ff**3 for memory in self._memories(layers))
        generated = sum(self.config.prompts.context_tokens)
        words = f"{method}: {counted(count, 'value')} in about {steps} steps, at most {most}; solve"
        usual = self._values(count, top, steps) + again * self._values(count, top, min(USUAL_MORE, most))
        stage = self._stage("edit", words, usual, generated, solving)
        longest = self._stage("edit", words, (1 + again) * self._values(count, top, most), generated, solving)
        return replace(stage, longest=longest.seconds)

    def evaluating(self) -> Stage:
        """Estimate the questions before and after, what the model says, and drift."""
        asked = questions(self.editable, self.facts, self.facts)
        texts = [text for q in asked for text in q.texts]
        tokens = 2 * sum(len(text.ids) for text in texts) + 3 * DRIFT_ROWS * DRIFT_TOKENS
        batches = 2 * -(-sum(1 + len(q.paraphrases) for q in asked) // ROWS)
        words = f"{counted(len(texts), 'answer')} before and after, what the model says, drift"
        return self._stage("evaluate", words, tokens, batches * TEXT_TOKENS + DRIFT_TOKENS)

    def matrices(self, layers: Sequence[int]) -> int:
        """Return the bytes of the equations, or of the sums of the key statistics if these are more: docs/scale.md."""
        widths = [memory.d_ff for memory in self._memories(layers)]
        solve = 8 * (3 * max(widths) ** 2 + 3 * max(widths) * self.editable.d_model)
        return max(solve, 32 * sum(width**2 for width in widths))

    def _values(self, count: int, layer: int, steps: int) -> float:
        """Count the tokens of choosing the values of `count` subjects at a layer."""
        prompts = self.config.prompts
        prefix = fmean(prompts.context_tokens) if prompts.context_tokens else 0.0
        texts = (1 + prompts.contexts) * (self.length + prefix) + len(prompts.essence_prompts) * self.length
        return count * texts * (1 + steps * WITH_GRADIENT * (self.depth - layer) / self.depth)

    def _memories(self, layers: Sequence[int]) -> list[KeyValueMemory]:
        return [memory for layer in layers for memory in self.editable.feed_forward[layer].memories]

    def _stage(self, name: str, words: str, tokens: float, generated: int = 0, more: float = 0.0) -> Stage:
        return Stage(name, words, round(tokens), tokens * self.per_token + generated * self.generated + more)


@torch.no_grad()
def _run(editable: Editable, rows: int, tokens: int) -> None:
    """Run a batch as an edit does: the vocabulary is read at one token of each row only."""
    ids = torch.ones(rows, tokens, dtype=torch.long)
    replay.forward(editable, ids, torch.tensor([(row, tokens - 1) for row in range(rows)]))
