"""All the numbers of an edit, in one frozen place.

Every length is relative: δ to the norm of the layer's own output at the subject, the KL term and the decay to nats.
So one set of defaults serves models of every size, and there is no file of numbers per model. The defaults were
tuned on the tuning part of `evaluations/atlas-counterfact.json` only.
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
        phrasings: how many continuations of the subject the model itself samples; in half of them the subject begins
            the text, in half it stands where the model's own sentences most likely name it.
        mention_tokens: how many tokens stand before the subject in the latter.
        phrasing_tokens: their length in tokens.
        phrasings_per_step: how many of them take part in a step, in turn.
        steps: Adam steps; their length falls to nothing along a cosine.
        step_size: length of the first Adam step relative to ‖W k*‖.
        attempts: how often the optimisation goes on, with what is kept and the decay weighing less, while the new
            object stays below `enough` in some context: an edit that does not take keeps nothing.
        ease: factor on these weights at each further attempt.
        enough: probability of the new object in every context that ends the attempts.
        clamp: largest ‖δ‖ relative to ‖W k*‖.
        weight_decay: weight of ‖δ‖² / ‖W k*‖², nats.
        essence: weight of the KL divergence at each essence prompt ("{} is a").
        keep: weight of the KL divergence along an own phrasing, summed over its tokens.
        own: weight of the new object in the model's own phrasings, relative to that in the fact's prompt.
        steady: how much the fact's own texts count, against all ordinary text, when the change is spread over the keys:
            so that it is the same in every context of the subject, and nothing beside it.
    """

    seed: int = 0
    contexts: int = 4
    context_tokens: tuple[int, ...] = (5, 10)
    phrasings: int = 64
    mention_tokens: int = 6
    phrasing_tokens: int = 14
    phrasings_per_step: int = 16
    steps: int = 25
    step_size: float = 0.4
    attempts: int = 3
    ease: float = 0.25
    enough: float = 0.5
    clamp: float = 4.0
    weight_decay: float = 6.0
    essence: float = 0.1
    keep: float = 6.0
    own: float = 0.5
    steady: float = 0.1
