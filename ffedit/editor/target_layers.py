"""Select the memories of a layer that a fact is written to.

A dense layer has one. In a mixture of experts, a fact is written to the experts that the subject's last token is routed
to in at least half of the texts stating the fact, and to every shared one. The router itself is never changed; its
routes are measured before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffedit.algebra.linalg import double
from ffedit.editor.edit import Edit, restored
from ffedit.editor.job import Job
from ffedit.editor.key import PromptSet
from ffedit.errors import EditError
from ffedit.inference.routing import Routes, mixtures, routes
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import Encoded

# Share of the texts stating a fact that must be routed to an expert for the fact to be written to it.
OFTEN = 0.5


def find_ff_layers(editable: Editable, layers: Sequence[int], prompt_sets: Sequence[PromptSet]) -> list[FeedForward]:
    """Return the memories of `layers` that the facts' keys are routed to, by layer; a dense layer needs no prompts."""
    ff_layers = {layer: editable.feed_forward[layer] for layer in layers}
    mixed = [layer for layer, ff in ff_layers.items() if ff.mixture is not None]
    for layer, by_text in routes(editable, _texts(prompt_sets), mixed).items():
        ff, routed = ff_layers[layer], by_text.weights.shape[1]
        written = {memory.address.expert for memory in ff.memories if (memory.address.expert or 0) >= routed}  # shared
        for subject in _by_subject(by_text, prompt_sets):
            written |= set((subject.shares >= min(OFTEN, float(subject.shares.max()))).nonzero()[:, 0].tolist())
        ff_layers[layer] = ff.only(memory.address for memory in ff.memories if memory.address.expert in written)
    return list(ff_layers.values())


def _texts(prompt_sets: Sequence[PromptSet]) -> list[Encoded]:
    return [text for prompt_set in prompt_sets for text in prompt_set.prompts]


def _by_subject(by_text: Routes, prompt_sets: Sequence[PromptSet]) -> list[Routes]:
    return [Routes(rows) for rows in by_text.weights.split([len(prompt_set.prompts) for prompt_set in prompt_sets])]


def check_routes(
    editable: Editable, ff: FeedForward, subjects: Sequence[str], prompt_sets: Sequence[PromptSet]
) -> None:
    """Check that the subjects are still routed to the experts of `ff`, with the layers below it edited."""
    if ff.mixture is None:
        return
    by_text = routes(editable, _texts(prompt_sets), [ff.layer])[ff.layer]
    written = {memory.address.expert for memory in ff.memories}
    for subject, routed in zip(subjects, _by_subject(by_text, prompt_sets), strict=True):
        flipped = [expert for expert in (routed.shares > OFTEN).nonzero()[:, 0].tolist() if expert not in written]
        if flipped:
            named = ", ".join(str(memory.address) for memory in ff.memories)
            raise EditError(
                f"the edit of the layers below sends {subject!r} to expert {ff.layer}.{flipped[0]}, but this "
                f"layer is edited in {named}; write to a single layer"
            )


def routing(job: Job, edit: Edit, prompt_sets: Sequence[PromptSet]) -> dict[str, Any]:
    """Describe the routes before and after an edit of a mixture, as plain JSON by layer.

    `texts` is the number of texts stating the facts; `experts` has, for each expert, the `share` of texts whose subject
    is routed to it and its mean `weight` in them; `moved` is the share routed to other experts once the edit is in the
    model; for an edited layer, `written` are its experts, and `covered` is the share of the router's weight on them.
    """
    editable = job.editable
    texts = _texts(prompt_sets)
    before = routes(editable, texts, mixtures(editable))
    with restored(job.memories):
        for at, delta in edit.updates.items():
            editable.memories[at].write_(delta)
        after = routes(editable, texts, mixtures(editable))
    edited = {ff.layer: [memory.address.expert or 0 for memory in ff.memories] for ff in job.ff_layers}
    description: dict[str, Any] = {}
    for layer, layer_routes in before.items():
        chosen, weights = layer_routes.shares.nonzero()[:, 0].tolist(), layer_routes.mean_weights
        description[str(layer)] = {
            "texts": len(layer_routes.weights),
            "experts": {str(e): {"share": float(layer_routes.shares[e]), "weight": float(weights[e])} for e in chosen},
            "moved": float(double((layer_routes.chosen != after[layer].chosen).any(1)).mean()),
        }
        if (written := edited.get(layer)) is not None:
            covered = layer_routes.covered([e for e in written if e < layer_routes.weights.shape[1]])
            description[str(layer)] |= {"written": written, "covered": covered}
    return description
