"""All the numbers of an edit, in the order in which it is made: prompts, key, value, and the method's own.

Every length is relative: δ to the residual stream behind the layer, λ to the weight of the facts' own keys. So one set
of defaults serves models of every size. They were chosen on development facts of SmolLM2-135M and Gemma 3 270M
(`evaluations/data`) and checked on those of Qwen2.5-Coder-1.5B; `evaluations/reports/ablation.md` shows their benefit
and cost.

A number is named by its record and its field: `value.steps`, or `memit.ridge` for one of the method's own
(`Method.numbers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from ffedit.errors import EditError
from ffedit.facts.fact import as_protected
from ffedit.facts.fact_token import FactToken, as_fact_token
from ffedit.inference.corpus import as_seed

Numbers = TypeVar("Numbers")
Names: TypeAlias = tuple[str, ...]

# By the type of a default: the types that a value may have, and their name in messages.
_KINDS: dict[type, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "True or False"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    tuple: (tuple, "a list"),
}


def check_numbers(record: str, numbers: Any, counts: Names = (), positive: Names = (), weights: Names = ()) -> None:
    """Refuse values of another type than a field's default, and numbers out of range.

    Out of range are `counts` below 1, `positive` numbers that are not above 0, and `weights` below 0 or infinite.
    Numbers of numpy become Python's, which JSON can hold, and lists become tuples.
    """
    for entry in fields(numbers):
        value = getattr(numbers, entry.name)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, list):
            value = tuple(value)
        if type(entry.default) in _KINDS:
            kind, expected = _KINDS[type(entry.default)]
            differs = isinstance(value, bool) != isinstance(entry.default, bool)  # True is an int
            if differs or not isinstance(value, kind):
                raise EditError(f"{record}.{entry.name} is {value!r}; {expected} was expected")
        object.__setattr__(numbers, entry.name, value)
    for name in (*counts, *positive, *weights):
        number = getattr(numbers, name)
        # `not >=` rather than `<`, which is False for NaN.
        if name in counts and not number >= 1:
            raise EditError(f"{record}.{name} is {number}; at least 1 was expected")
        if name in positive and not number > 0:
            raise EditError(f"{record}.{name} is {number}; a number above 0 was expected")
        if name in weights and not number >= 0:
            raise EditError(f"{record}.{name} is {number}; 0 or more was expected")
        if name in weights and number == inf:
            raise EditError(f"{record}.{name} is {number}; a finite number was expected")


@dataclass(frozen=True)
class PromptConfig:
    """Texts on which a value is optimised.

    Attributes:
        contexts: number of prefixes, sampled from the model, each put before the prompt; the bare prompt is used, too.
        context_tokens: lengths of the prefixes in tokens, used in turn.
        essence_prompts: prompts about the subject, which replaces `{}`; the distribution after them should stay.
    """

    contexts: int = 2
    context_tokens: tuple[int, ...] = (5, 10)
    essence_prompts: tuple[str, ...] = ("{} is a",)

    def __post_init__(self) -> None:
        check_numbers("prompts", self, weights=("contexts",))
        lengths = tuple(EditError.whole("an entry of prompts.context_tokens", n, 1) for n in self.context_tokens)
        if self.contexts and not lengths:
            raise EditError("prompts.context_tokens is empty; give a length, or prompts.contexts=0")
        object.__setattr__(self, "context_tokens", lengths)
        for prompt in self.essence_prompts:
            EditError.require(prompt, str, "a text was expected as an entry of prompts.essence_prompts")
            if "{}" not in prompt:
                raise EditError(f"prompts.essence_prompts: {prompt!r} has no {{}} where the subject would stand")


@dataclass(frozen=True)
class KeyConfig:
    """Position of the key, and the weight of contexts, other names and protected texts.

    Attributes:
        fact_token: where the key is read and the value written: "subject_last", "subject_first", "last" (the
            prompt's), the number of one of the subject's tokens (from 0, or from -1 at its end), or a word of the
            subject, whose last token it is. Kept as text.
        context_weight: weight of the spread of a subject's key over its contexts (for several subjects, their mean)
            relative to ordinary text; it makes a subject receive nearly the same δ in every context.
        mention_share: share of the key that is read in neutral mentions of the subject ("The story of ..."); the rest
            is read in the texts that state the fact, which all have the same words around it.
        names_weight: weight of the keys of other names relative to ordinary text; it makes them receive little of δ.
        without_names: names left out, with names that contain them or are part of them, as the facts' subjects are.
        keep_beginning: whether the keys of tokens that begin a text, attention sinks, keep their values, like keys of
            earlier edits.
        protect: names and texts whose keys should keep their values, too.
    """

    fact_token: FactToken = "subject_last"
    context_weight: float = 3.0
    mention_share: float = 0.5
    names_weight: float = 10.0
    without_names: tuple[str, ...] = ()
    keep_beginning: bool = True
    protect: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "protect", as_protected("key.protect", self.protect))
        check_numbers("key", self, weights=("context_weight", "mention_share", "names_weight"))
        if self.mention_share > 1:
            raise EditError(f"key.mention_share is {self.mention_share}; at most 1 was expected")
        for name in self.without_names:
            EditError.require(name, str, "a name was expected as an entry of key.without_names")
        object.__setattr__(self, "fact_token", as_fact_token(self.fact_token))


@dataclass(frozen=True)
class ValueConfig:
    """Hyperparameters of the value's optimisation.

    Attributes:
        steps: largest number of optimisation steps.
        step_size: length of a step relative to the residual stream's norm, along the gradient; with `optimizer` "adam",
            Adam's rate, in the units of the layer's output.
        optimizer: "gradient" (normalised gradient steps) or "adam" (as published; lengths are then relative to ‖W k*‖).
        target_probability: probability of the new object, in every context, at which the optimisation ends; where it is
            at least 0.5 in every context from the start, δ stays 0. More than 1 asks for all steps.
        target_loss: loss with all its terms, in nats, below which the optimisation ends (published: 0.05).
        max_delta_norm: largest ‖δ‖ relative to the residual stream's norm.
        weight_decay: weight of ‖δ‖² relative to the residual stream's squared norm, in nats.
        kl_weight: weight of the mean KL divergence at the essence prompts.
        keep_weight: weight of the mean KL divergence at the facts' `keep` prompts, the same in every step.
        penalty_decay: factor on `weight_decay` and `kl_weight` from step to step: easy facts end early, while the
            penalties are high, with a small δ; hard ones end once the penalties are low.
        rounds: how often the values of several subjects are chosen: after the first round with all facts written, so
            that a fact that the others suppress gets a longer δ. Always once for a single subject, and in a quantised
            model.
    """

    steps: int = 80
    step_size: float = 0.2
    optimizer: Literal["gradient", "adam"] = "gradient"
    target_probability: float = 0.8
    target_loss: float = 0.0
    max_delta_norm: float = 4.0
    weight_decay: float = 8.0
    kl_weight: float = 1.0
    keep_weight: float = 4.0
    penalty_decay: float = 0.9
    rounds: int = 1

    def __post_init__(self) -> None:
        positive = ("step_size", "max_delta_norm", "target_probability", "penalty_decay")
        weights = ("target_loss", "kl_weight", "keep_weight", "weight_decay")
        check_numbers("value", self, ("steps", "rounds"), positive, weights)
        if self.penalty_decay > 1:
            raise EditError(f"value.penalty_decay is {self.penalty_decay}; at most 1 was expected")
        if self.optimizer not in ("gradient", "adam"):
            raise EditError(f"value.optimizer is {self.optimizer!r}; gradient or adam was expected")

    def rounds_of(self, subjects: int) -> int:
        """Return the number of rounds in which the values of so many `subjects`, written together, are chosen."""
        return self.rounds if subjects > 1 else 1


@dataclass(frozen=True)
class EditConfig:
    """All numbers of an edit.

    Attributes:
        seed: seed of contexts and of sampled text for the statistics.
        methods: numbers of single methods, by the method's name, such as {"memit": MemitConfig(ridge=0.01)}; a method
            that is not named takes its defaults.
    """

    seed: int = 0
    prompts: PromptConfig = PromptConfig()
    key: KeyConfig = KeyConfig()
    value: ValueConfig = ValueConfig()
    methods: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        kinds = {"prompts": PromptConfig, "key": KeyConfig, "value": ValueConfig, "methods": Mapping}
        for name, kind in kinds.items():
            EditError.require(getattr(self, name), kind, f"{name} was expected to be a {kind.__name__}")
        object.__setattr__(self, "seed", as_seed(self.seed))

    def of(self, method: str, kind: type[Numbers]) -> Numbers:
        """Return the numbers of a method: those in `methods`, or the defaults of `kind`."""
        numbers = self.methods.get(method, kind())
        if not isinstance(numbers, kind):
            raise EditError(f"the numbers of {method} are {numbers!r}; a {kind.__name__} was expected")
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: "seed", "prompts", "key", "value", and the numbers of each of `methods` by its name."""
        numbers = asdict(self)
        methods = numbers.pop("methods")
        return {**numbers, **methods}


def dotted(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested numbers: {"seed": 0, "value": {"steps": 80}} to {"seed": 0, "value.steps": 80}."""
    flat: dict[str, Any] = {}
    for name, value in numbers.items():
        flat |= {f"{name}.{field}": v for field, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat
