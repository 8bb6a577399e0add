"""All the numbers of an edit, in one frozen place.

Every length is relative: δ to the norm of the layer's own output at the subject, the KL term and the decay to nats. So one
set of defaults serves models of every size, and there is no file of numbers per model. The defaults were tuned on the
tuning part of `evaluations/atlas-counterfact.json` only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EditConfig:
    """How v* and k* are found.

    Attributes:
        seed: of contexts, of the model's own phrasings and of the text for the statistics.
        contexts: how many prefixes, sampled from the model, stand before the prompt; the bare prompt comes on top.
        context_tokens: lengths of the prefixes in tokens, used in turn.
        phrasings: how many continuations of the subject the model itself samples.
        phrasing_tokens: their length in tokens.
        steps: most Adam steps.
        step_size: length of an Adam step relative to ‖W k*‖.
        clamp: largest ‖δ‖ relative to ‖W k*‖.
        weight_decay: weight of ‖δ‖² / ‖W k*‖², nats.
        essence: weight of the KL divergence at the essence prompts ("{} is a").
        keep: weight of the KL divergence along the model's own phrasings.
        own: weight of the new object in the model's own phrasings, relative to that in the fact's prompt.
        enough: stop once the new object has this probability in every context and the kept terms no longer fall.
    """

    seed: int = 0
    contexts: int = 8
    context_tokens: tuple[int, ...] = (5, 10)
    phrasings: int = 32
    phrasing_tokens: int = 14
    steps: int = 25
    step_size: float = 0.25
    clamp: float = 4.0
    weight_decay: float = 0.01
    essence: float = 0.1
    keep: float = 1.0
    own: float = 1.0
    enough: float = 0.99
