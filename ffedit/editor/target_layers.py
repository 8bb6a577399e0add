"""Select the memories of a layer that a fact is written to.

A dense layer has one. In a mixture of experts, a fact is written to the experts that the subject's last token is routed
to in at least half of the texts stating the fact, and to every shared one. The router itself is never changed. Its
routes are measured before and after: the share of its weight on the written experts over contexts, and whether a text
is routed to other experts once the edit is in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ffedit.algebra.linalg import double
from ffedit.editor.edit import Edit, restored
from ffedit.editor.prompts import PromptSet
from ffedit.errors import EditError
from ffedit.inference.routing import Routes, mixtures, routes
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address

if TYPE_CHECKING:
    from ffedit.editor.solve import Job

# Share of the texts stating a fact that must be routed to an expert for it to be written.
OFTEN = 0.5


def find_ff_layers(editable: Editable, layers: Sequence[int], prompt_sets: Sequence[PromptSet]) -> list[FeedForward]:
    """Return the memories of `layers` that the facts' keys are routed to, by layer; a dense layer needs no prompts."""
    mixed = [layer for layer in layers if editable.feed_forward[layer].mixture is not None]
    by_layer = routes(editable, [text for prompt_set in prompt_sets for text in prompt_set.prompts], mixed)
    return [
        editable.feed_forward[layer].only(_written(editable.feed_forward[layer], by_layer[layer], prompt_sets))
        if layer in by_layer
        else editable.feed_forward[layer]
        for layer in layers
    ]


def _written(layer: FeedForward, routes_of: Routes, prompt_sets: Sequence[PromptSet]) -> list[Address]:
    """Return the addresses of the experts that any subject is routed to, and of the shared experts."""
    routed = routes_of.weights.shape[1]
    chosen = {memory.address.expert for memory in layer.memories if (memory.address.expert or 0) >= routed}
    for rows in torch.arange(len(routes_of.weights)).split([len(prompt_set.prompts) for prompt_set in prompt_sets]):
        shares = routes_of.some(rows).shares
        chosen |= set((shares >= min(OFTEN, float(shares.max()))).nonzero()[:, 0].tolist())
    return [memory.address for memory in layer.memories if memory.address.expert in chosen]


def check_routes(
    editable: Editable, ff: FeedForward, subjects: Sequence[str], prompt_sets: Sequence[PromptSet]
) -> None:
    """Check that the subjects are still routed to the experts of `ff`, with the layers below it edited."""
    if ff.mixture is None:
        return
    texts = [text for prompt_set in prompt_sets for text in prompt_set.prompts]
    routes_of = routes(editable, texts, [ff.layer])[ff.layer]
    written = {memory.address.expert for memory in ff.memories}
    counts = [len(prompt_set.prompts) for prompt_set in prompt_sets]
    for subject, rows in zip(subjects, torch.arange(len(routes_of.weights)).split(counts), strict=True):
        shares = routes_of.some(rows).shares
        flipped = [e for e in (shares > OFTEN).nonzero()[:, 0].tolist() if e not in written]
        if flipped:
            named = ", ".join(str(memory.address) for memory in ff.memories)
            raise EditError(
                f"the routing flips under the edit: {subject!r} goes to expert {ff.layer}.{flipped[0]} once "
                f"the layers below are edited, and was to be written to {named}; write to one layer"
            )


def routing(job: Job, edit: Edit, prompt_sets: Sequence[PromptSet]) -> dict[str, Any]:
    """Describe the routes before and after an edit of a mixture, as plain JSON by layer.

    `texts` is the number of texts stating the facts; `experts`, for each expert the `share` of them whose subject is
    routed to it and its mean `weight` then; `moved`, the share routed to other experts once the edit is in the model;
    for an edited layer, `written`, the experts, and `covered`, the share of the router's weight on them.
    """
    editable = job.editable
    texts = [text for prompt_set in prompt_sets for text in prompt_set.prompts]
    before = routes(editable, texts, mixtures(editable))
    with restored(job.memories):
        for at, delta in edit.updates.items():
            editable.memories[at].write_(delta)
        after = routes(editable, texts, mixtures(editable))
    about: dict[str, Any] = {}
    for layer, own in before.items():
        chosen, weights = own.shares.nonzero()[:, 0].tolist(), own.mean_weights
        about[str(layer)] = {
            "texts": len(own.weights),
            "experts": {str(e): {"share": float(own.shares[e]), "weight": float(weights[e])} for e in chosen},
            "moved": float(double((own.chosen != after[layer].chosen).any(1)).mean()),
        }
    for ff in job.ff_layers:
        if ff.mixture is None:
            continue
        written, count = [memory.address.expert or 0 for memory in ff.memories], before[ff.layer].weights.shape[1]
        covered = before[ff.layer].covered([e for e in written if e < count])
        about[str(ff.layer)] |= {"written": written, "covered": covered}
    return about
