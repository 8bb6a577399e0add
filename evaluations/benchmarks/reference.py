"""Trace as published, for comparison: one pass of the whole model for each token and layer.

The procedure of ROME (Meng et al. 2022, arXiv 2202.05262, section 2.1, and the notebook published with it). Every pass
holds one clean row and `samples` corrupted ones, all with the same prompt. A hook on the embeddings adds the noise to
the corrupted rows; a hook on the restored module copies the clean row's output at one token into all others. The whole
model runs on all tokens and unembeds all of them.

Effects and speed are compared with it. So it does only what was published, without waste (no cache or graph is built,
and only the hooks copy) and without improvements. One thing is more general than the publication: an answer may have
several tokens; with one token, this is the published loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import measuring
import numpy as np
import torch
from torch import Tensor, nn

from ffedit import Editable
from ffedit.model.hooks import tensor_of
from ffedit.model.tokenization import Encoded

Kind: TypeAlias = Literal["state", "feed_forward", "attention"]
Change: TypeAlias = Callable[[Tensor], object]


@dataclass(frozen=True, eq=False)
class Traced:
    """The result of the reference.

    Attributes:
        effects: indirect effects, mean over samples, [layers, tokens of the prompt], probability; NaN where not asked.
        clean: probability of the answer in the clean row.
        corrupted: the same in the corrupted rows, mean over samples.
        passes: forward passes of the whole model.
    """

    effects: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    clean: float
    corrupted: float
    passes: int


def window_around(layer: int, window: int, depth: int) -> range:
    """Return layers max(0, l − w//2) up to min(L, l + ceil(w/2)) − 1 (arXiv 2202.05262, section 2.1)."""
    return range(max(0, layer - window // 2), min(depth, layer + (window + 1) // 2))


@torch.no_grad()
def noise_level(editable: Editable, scale: float = 3.0) -> float:
    """Return `scale` times the standard deviation of all entries of the embedding's output, over the vocabulary."""
    size = int(editable.model.config.get_text_config().vocab_size)
    return scale * float(editable.embedding(torch.arange(size, device=editable.device)).float().std())


@torch.no_grad()
def trace(
    editable: Editable,
    ids: Sequence[int],
    subject: tuple[int, int],
    answer: int,
    kind: Kind,
    *,
    sigma: float,
    window: int = 1,
    samples: int = 10,
    seed: int = 0,
    pairs: Iterable[tuple[int, int]] | None = None,
) -> Traced:
    """Trace one fact.

    Args:
        editable: the model and its parts.
        ids: the tokens of the prompt and then of the answer.
        subject: first token of the subject and the one after its last.
        answer: index of the answer's first token in `ids`.
        kind: which outputs are restored: of a block ("state"), of the value matrix ("feed_forward"), or of the
            attention's output projection ("attention").
        sigma: standard deviation of the noise, in the units of the embedding; drawn once, shared by all restorations.
        window: number of layers restored together; ignored for states.
        samples: corrupted rows.
        seed: seed of the noise.
        pairs: the (layer, token) pairs to restore; by default all of the prompt.
    """
    depth, rows = len(editable.layers), samples + 1
    start, end = subject
    width = int(editable.memories[0].value.shape[0])
    inputs = torch.tensor([list(ids[:-1])] * rows, device=editable.device)
    answers = torch.tensor(list(ids[answer:]), device=editable.device).expand(rows, -1)[..., None]
    generator = torch.Generator().manual_seed(seed)
    noise = (sigma * torch.randn(samples, end - start, width, generator=generator)).to(editable.device)

    def corrupt(embedded: Tensor) -> None:
        embedded[1:, start:end] += noise

    def run(changes: Iterable[tuple[nn.Module, Change]]) -> Tensor:
        """Return the probability of the answer in each row, [rows]; each change alters a module's output in place."""
        with ExitStack() as stack:
            for module, change in [(editable.embedding, corrupt), *changes]:
                stack.callback(module.register_forward_hook(_altering(change, rows)).remove)
            logits: Tensor = editable.model(input_ids=inputs, use_cache=False).logits
        log_probs = logits[:, answer - 1 :].float().log_softmax(-1)
        return log_probs.gather(-1, answers)[..., 0].sum(-1).double().exp()

    restorable = _modules(editable, kind)
    without = run(())
    corrupted = float(without[1:].mean())
    effects = np.full((depth, answer), np.nan)
    restored = [(layer, token) for token in range(answer) for layer in range(depth)] if pairs is None else list(pairs)
    for layer, token in restored:
        inside = [layer] if kind == "state" else window_around(layer, window, depth)
        changes = [(restorable[i], _restoring(token)) for i in inside]
        effects[layer, token] = float(run(changes)[1:].mean()) - corrupted
    return Traced(effects, float(without[0]), corrupted, 1 + len(restored))


def products(editable: Editable, text: Encoded, kind: Kind, window: int, samples: int) -> tuple[int, int]:
    """Return the multiply-accumulates of the reference and of exact tracing, for one fact.

    A token costs the entries of a layer's matrices in each layer and the unembedding's entries once for its logits; the
    products of queries with keys and of their weights with values are neglected (below 1 % at these lengths).

    The reference: every (layer, token of the prompt) and the corrupted run, with all rows, tokens, layers and logits.
    Exact tracing: one pass of all rows, recorded, with logits for the answer only; then for each restoration the
    corrupted rows from its token on, from the first layer that it changes: for states the one above, else the window's
    first. Nothing is run left of the subject, where nothing changes, or where no later attention reads the token and
    the answer is not read there.
    """
    assert text.subject is not None
    layers, vocabulary = measuring.matrix_entries(editable)
    depth, tokens, answers = len(layers), len(text.ids) - 1, len(text.ids) - text.answer
    whole = tokens * (sum(layers) + vocabulary)
    published = (depth * text.answer + 1) * (samples + 1) * whole
    needed = (samples + 1) * (tokens * sum(layers) + answers * vocabulary)
    for layer in range(depth):
        first = layer + 1 if kind == "state" else window_around(layer, window, depth)[0]
        read = first < depth if kind == "state" else first < depth - 1
        for token in range(text.subject[0], text.answer):
            if read or token == text.answer - 1:
                needed += samples * ((tokens - token) * sum(layers[first:]) + answers * vocabulary)
    return published, needed


def _modules(editable: Editable, kind: Kind) -> list[nn.Module]:
    """Return the modules whose outputs `kind` names, by layer."""
    if kind == "state":
        return editable.layers
    if kind == "attention":
        return editable.attention
    return [layer.module for layer in editable.feed_forward]


def _altering(change: Change, rows: int) -> Callable[[nn.Module, Any, Any], None]:
    """Return a forward hook that gives `change` a module's output, whatever its form, as [rows, tokens, d_model]."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        tensor = tensor_of(output)
        change(tensor.view(rows, -1, tensor.shape[-1]))  # some modules flatten rows and tokens

    return hook


def _restoring(token: int) -> Change:
    """Return a change that copies the clean row's output at `token` into the corrupted rows."""

    def change(output: Tensor) -> None:
        output[1:, token] = output[0, token]

    return change
