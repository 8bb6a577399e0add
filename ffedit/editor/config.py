"""All the numbers of an edit, in one frozen place.

Every length is relative: δ to the norm of the layer's own output at the subject, the KL term and the decay to nats, λ
to what the facts' own keys weigh. So one set of defaults serves models of every size, and there is no file of numbers
per model. The defaults were tuned on the tuning part of `evaluations/atlas-counterfact.json`, `crowding` and `give_up`
also on 300 other facts of Atlas: on no subject of the reporting part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from ffedit.errors import EditError


@dataclass(frozen=True)
class EditConfig:
    """How k*, v* and Δ are found.

    Attributes:
        seed: of contexts, of the model's own phrasings and of the text for the statistics.
        contexts: how many prefixes, sampled from the model, stand before the prompt; the bare prompt comes on top.
        context_tokens: lengths of the prefixes in tokens, used in turn.
        phrasings: how many continuations of the subject the model itself samples; in half of them the subject begins
            the text, in half it stands where the model's own sentences most likely name it.
        mention_tokens: how many tokens stand before the subject in the latter.
        phrasing_tokens: their length in tokens.
        phrasings_per_step: how many of them take part in a step, in turn.
        essence_prompts: what else is said of the subject, `{}` in each; the distribution after it is to stay.
        steps: Adam steps.
        step_size: length of the first Adam step relative to ‖W k*‖.
        absolute: `step_size` is instead the first step of each entry of δ, in the units of the layer's output.
        anneal: the steps' length falls to nothing along a cosine.
        stop: loss, in nats, below which a fact's optimisation ends.
        attempts: how often the optimisation goes on, with what is kept and the decay weighing less, while the new
            object stays below `enough` in some context: an edit that does not take keeps nothing.
        ease: factor on these weights at each further attempt.
        enough: probability of the new object that ends the attempts where every context gives it; where each fact's
            bare prompt gives it from the start, there is nothing to write.
        clamp: largest ‖δ‖ relative to ‖W k*‖.
        weight_decay: weight of ‖δ‖² / ‖W k*‖², nats.
        crowding: by how much more it weighs among as many subjects as the layer has memories (`among`).
        essence: weight of the KL divergence at each essence prompt.
        keep: weight of the KL divergence along an own phrasing, summed over its tokens.
        swap: what is kept is the distribution with the old object's probability given to the new one.
        own: weight of the new object in the model's own phrasings, relative to that in the fact's prompt.
        namesakes: how many other names are drawn from the model for each text, in the subject's place.
        steady: how much each subject's own texts count, against all ordinary text, when the change is spread over the
            keys: so that it is the same in every context of the subject, and nothing beside it. Its namesakes count as
            much, but those of all subjects together no more than ordinary text.
        give_up: share of its residual that a fact alone gives up to ordinary text in least squares: λ relative to the
            keys' own weight.
        null_share: largest share of trace(C) that the null space of `alphaedit` holds.
        null_give_up: what it gives up there to the size of Δ: λ relative to the keys' part in the null space.
        unburdened: values are chosen as if earlier edits of other subjects were not there (`job.Job.unburdened`); not
            in `rome`, which writes its own facts on top of each other too.
        tune_steps: Adam steps of `ft` and `ft-l`.
        tune_rate: their step size relative to the root mean square of W.
        tune_bound: largest change of an entry of W in `ft-l`, relative to the same.
    """

    seed: int = 0
    contexts: int = 4
    context_tokens: tuple[int, ...] = (5, 10)
    phrasings: int = 0
    mention_tokens: int = 6
    phrasing_tokens: int = 14
    phrasings_per_step: int = 12
    essence_prompts: tuple[str, ...] = ("{} is a",)
    steps: int = 40
    step_size: float = 0.1
    absolute: bool = False
    anneal: bool = False
    stop: float = 0.0
    target_probability: float = 0.5
    attempts: int = 1
    ease: float = 0.25
    enough: float = 0.5
    clamp: float = 4.0
    weight_decay: float = 8.0
    fall: float = 0.8
    crowding: float = 0.0
    essence: float = 1.0
    keep: float = 0.0
    swap: bool = False
    own: float = 0.0
    namesakes: int = 0
    steady: float = 0.03
    beside: bool = False
    surround: bool = False
    give_up: float = 0.003
    null_share: float = 0.1
    null_give_up: float = 0.001
    unburdened: bool = False
    tune_steps: int = 25
    tune_rate: float = 0.02
    tune_bound: float = 0.05

    def __post_init__(self) -> None:
        """Refuse numbers without meaning.

        Raises:
            EditError: a count or weight that is too small.
        """
        for name in ("steps", "attempts", "phrasings_per_step", "tune_steps"):
            if getattr(self, name) < 1:
                raise EditError(f"EditConfig.{name} is {getattr(self, name)}; at least 1 was expected")
        for name in ("step_size", "clamp"):
            if not getattr(self, name) > 0:
                raise EditError(f"EditConfig.{name} is {getattr(self, name)}; a number above 0 was expected")
        weights = ("weight_decay", "crowding", "essence", "keep", "own", "steady")
        for name in (*weights, "give_up", "null_share", "null_give_up"):
            if not getattr(self, name) >= 0:
                raise EditError(f"EditConfig.{name} is {getattr(self, name)}; 0 or more was expected")

    def among(self, subjects: int, memories: int) -> EditConfig:
        """The numbers for a value that is chosen as one of so many in a layer of d_ff `memories`.

        What a change moves in other text adds up over all subjects, and all other facts suffer it: so the price of
        ‖δ‖² grows with their number.
        """
        crowd = self.crowding * (subjects - 1) / memories
        return replace(self, weight_decay=self.weight_decay * (1 + crowd))

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> EditConfig:
        """What `dataclasses.asdict` made, also by way of JSON; numbers of other versions are left out."""
        known: dict[str, Any] = {field.name: numbers[field.name] for field in fields(cls) if field.name in numbers}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known)


# The numbers that ROME's authors published for GPT-2 XL (arXiv 2202.05262, appendix E.5, and the parameters that came
# with the paper), used for every model. Their decay is of ‖δ‖ / ‖v‖², which is not free of units; here it is squared.
# Their divergence is that of the edited distribution from the first one; here it is the other way round, as everywhere.
PAPER = EditConfig(
    contexts=20,
    phrasings=0,
    essence_prompts=("{} is a",),
    steps=20,
    step_size=0.5,
    absolute=True,
    anneal=False,
    stop=0.05,
    attempts=1,
    weight_decay=0.5,
    crowding=0.0,
    essence=0.0625,
    target_probability=2.0,
    fall=1.0,
    swap=False,
    steady=0.0,
    unburdened=False,
)

# Those of MEMIT's authors for GPT-J (arXiv 2210.07229, appendix, and the parameters that came with it). Where theirs is
# a multiple of what has no counterpart here, ROME's number or the default stands: their δ is bounded by 0.75 of the
# residual stream, here by a multiple of ‖W k*‖; their λ (15,000 for GPT-J, times E[k kᵀ]) is one model's, here
# `give_up` is relative to the keys.
PAPER_MEMIT = replace(PAPER, contexts=5, context_tokens=(10,), steps=25)

# By method. EMMET and AlphaEdit take MEMIT's procedure for v*; AlphaEdit's threshold of eigenvalues (0.02) is one
# model's, so the default share stands. Fine-tuning was published with absolute step sizes only.
PRESETS: Mapping[str, Mapping[str, EditConfig]] = MappingProxyType(
    {
        "default": dict.fromkeys(("rome", "emmet", "memit", "alphaedit", "ft", "ft-l"), EditConfig()),
        "paper": {"rome": PAPER, "emmet": PAPER_MEMIT, "memit": PAPER_MEMIT, "alphaedit": PAPER_MEMIT},
    }
)


def preset(name: str, method: str) -> EditConfig:
    """The numbers of a preset for a method: "default", or what was published with it, as far as it holds elsewhere.

    Raises:
        EditError: there is no such preset of this method.
    """
    if method not in PRESETS.get(name, {}):
        there = ", ".join(known for known, of in PRESETS.items() if method in of) or "none"
        raise EditError(f"there is no preset {name!r} for {method}; there is {there}")
    return PRESETS[name][method]
