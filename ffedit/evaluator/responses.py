"""Score given answers: the log-probability and the model's argmax at each of their tokens.

A token's prediction depends on its *context*, all tokens before it. Each context is run once (`inference.contexts`),
however many texts need it: a prompt that two objects share predicts the first token of both, and the first token of
free generation, which continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffedit.errors import ModelError
from ffedit.inference.batching import TOKENS
from ffedit.inference.contexts import NO_MEMORY, Context, Pass, passes
from ffedit.inference.generation import log_softmax
from ffedit.inference.replay import logits_at
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode
from ffedit.progress import Progress, silent


@dataclass(frozen=True)
class Answer:
    """Log-probability, nats, and argmax at each token of one answer, given the tokens before it.

    `argmax` also has the argmax after the last token where that was requested.
    """

    log_probs: tuple[float, ...]
    argmax: tuple[int, ...]


@torch.no_grad()
def ask(
    editable: Editable,
    texts: Iterable[Encoded],
    budget: int = TOKENS,
    closed: Collection[Encoded] = (),
    follower: Callable[[Pass[Tensor], Mapping[Context, int]], None] | None = None,
    progress: Progress = silent,
) -> dict[Encoded, Answer]:
    """Score the answers of `texts` with the model in its current state.

    Args:
        editable: the model.
        texts: prompts with answers.
        budget: padded tokens in a batch; a batch has one row at least.
        closed: those of `texts` for which the argmax after the last token is returned, too.
        follower: called after each pass with its result, which has read the log-probabilities of the token after each
            of its contexts, [contexts, vocabulary], nats, and with the argmax after every context so far.
        progress: progress callback.

    Raises:
        ModelError: the model's numbers are not finite.
    """
    needed = {text: [text.ids[:end] for end in range(text.answer, len(text.ids) + (text in closed))] for text in texts}
    tokens: dict[Context, set[int]] = {}
    for text, contexts in needed.items():
        for context in contexts:
            tokens.setdefault(context, set()).update(text.ids[len(context) : len(context) + 1])
    log_prob: dict[tuple[Context, int], float] = {}
    argmax: dict[Context, int] = {}

    def read(ids: Tensor, inputs: dict[str, Any], at: Tensor) -> Tensor:
        return log_softmax(logits_at(editable, ids, inputs, at))

    keep = follower is not None and editable.ragged
    for result in passes(editable, tokens, budget, read, ModelError(NO_MEMORY), keep):
        contexts, distribution = result.contexts, result.read
        top, best = distribution.max(-1)
        _check(editable, contexts, top)
        argmax.update(zip(contexts, best.tolist(), strict=True))
        pairs = [(i, context, token) for i, context in enumerate(contexts) for token in tokens[context]]
        entries = torch.tensor([(i, token) for i, _, token in pairs], dtype=torch.long).reshape(-1, 2)
        values = distribution[entries.to(distribution.device).unbind(1)].tolist()
        log_prob.update({(context, token): value for (_, context, token), value in zip(pairs, values, strict=True)})
        if follower is not None:
            follower(result, argmax)
        progress("measuring", len(argmax), len(tokens))
    return {
        text: Answer(
            tuple(log_prob[pair] for pair in zip(contexts, text.target_ids, strict=False)),
            tuple(argmax[context] for context in contexts),
        )
        for text, contexts in needed.items()
    }


def _check(editable: Editable, contexts: Sequence[Context], top: Tensor) -> None:
    """Raise ModelError where log-probabilities are not finite: comparisons with NaN are false, as if prompts failed."""
    if len(bad := (~top.isfinite()).nonzero()):
        text = decode(editable.tokenizer, contexts[int(bad[0])])
        edits = len(editable.history.known)
        edited = f" with {edits} edit{'s' if edits > 1 else ''}" if edits else ""
        raise ModelError(
            f"{editable.name}{edited}: the probabilities after {text[-60:]!r} are not finite (NaN), so there is no "
            "score; use a sound checkpoint, or a smaller edit"
        )
