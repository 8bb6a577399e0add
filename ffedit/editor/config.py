"""All the numbers of an edit, in one frozen place.

Every length is relative: δ to the residual stream behind the layer, the penalties to nats, λ to what the facts' own
keys weigh. So one set of defaults serves models of every size, and there is no file of numbers per model. The defaults
were chosen on the development facts of SmolLM2-135M (`evaluations/data/smollm2-counterfact.json`) and on the
development models of the zoo (`evaluations/scripts/train_zoo.py`); `evaluations/reports/ablation.md` says what each
brings and costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ffedit.errors import EditError
from ffedit.model.tokenization import FactToken


@dataclass(frozen=True)
class EditConfig:
    """How k*, v* and Δ are found.

    Attributes:
        seed: of contexts and of sampled text for the statistics.
        fact_token: where the key is read and the value written: "subject_last", "subject_first", or "last" (the
            prompt's).
        contexts: how many prefixes, sampled from the model, stand before the prompt; the bare prompt comes on top.
        context_tokens: lengths of the prefixes in tokens, used in turn.
        context_weight: how much the spread of a subject's key over its contexts counts, against all ordinary text, when
            the change is spread over the keys: so that the subject receives the same δ in every context.
        essence_prompts: what else is said of the subject, `{}` in each; the distribution after it is to stay.
        kl_weight: weight of the KL divergence at each essence prompt.
        steps: how many steps δ takes at most.
        step_size: length of a step relative to the residual stream's norm, along the gradient; with `optimizer` "adam",
            Adam's rate, in the units of the layer's output.
        optimizer: "gradient" (normalised gradient steps) or "adam" (as published; lengths are then relative to ‖W k*‖).
        target_probability: of the new object, at which a value is done if every context reaches it; where each gives
            it at least 0.5 from the start, nothing is changed. More than 1 asks for all steps.
        target_loss: the whole loss, in nats, below which a value is done (published: 0.05).
        max_delta_norm: largest ‖δ‖ relative to the residual stream's norm.
        weight_decay: price of ‖δ‖², relative to the residual stream's squared norm, nats.
        penalty_decay: factor on both penalties from step to step: easy facts end while a change is dear and stay
            small, hard ones are reached once it is cheap.
        memit_ridge: share of its residual that a fact alone gives up to ordinary text in least squares: λ relative to
            the keys' own weight.
        null_share: largest share of trace(C) that the null space of `alphaedit` holds.
        alphaedit_ridge: what a fact gives up there to the size of Δ: λ relative to the keys' part in the null space.
        tune_steps: Adam steps of `ft` and `ft-l`.
        tune_rate: their step size relative to the root mean square of W.
        tune_bound: largest change of an entry of W in `ft-l`, relative to the same.
    """

    seed: int = 0
    fact_token: FactToken = "subject_last"
    contexts: int = 2
    context_tokens: tuple[int, ...] = (5, 10)
    context_weight: float = 0.03
    essence_prompts: tuple[str, ...] = ("{} is a",)
    kl_weight: float = 1.0
    steps: int = 80
    step_size: float = 0.1
    optimizer: Literal["gradient", "adam"] = "gradient"
    target_probability: float = 0.6
    target_loss: float = 0.0
    max_delta_norm: float = 4.0
    weight_decay: float = 8.0
    penalty_decay: float = 0.9
    memit_ridge: float = 0.003
    null_share: float = 0.1
    alphaedit_ridge: float = 0.001
    tune_steps: int = 25
    tune_rate: float = 0.02
    tune_bound: float = 0.05

    def __post_init__(self) -> None:
        """Refuse numbers without meaning.

        Raises:
            EditError: a count or weight that is too small, an optimizer that is not known, or an essence prompt
                without a subject.
        """
        for name in ("steps", "tune_steps"):
            if getattr(self, name) < 1:
                raise EditError(f"EditConfig.{name} is {getattr(self, name)}; at least 1 was expected")
        for name in ("step_size", "max_delta_norm", "target_probability", "penalty_decay"):
            if not getattr(self, name) > 0:
                raise EditError(f"EditConfig.{name} is {getattr(self, name)}; a number above 0 was expected")
        weights = ("context_weight", "kl_weight", "weight_decay", "memit_ridge", "null_share", "alphaedit_ridge")
        for name in ("contexts", *weights):
            if not getattr(self, name) >= 0:
                raise EditError(f"EditConfig.{name} is {getattr(self, name)}; 0 or more was expected")
        if self.fact_token not in get_args(FactToken):
            tokens = ", ".join(get_args(FactToken))
            raise EditError(f"EditConfig.fact_token is {self.fact_token!r}; one of {tokens} was expected")
        if self.optimizer not in ("gradient", "adam"):
            raise EditError(f"EditConfig.optimizer is {self.optimizer!r}; gradient or adam was expected")
        for prompt in self.essence_prompts:
            if "{}" not in prompt:
                raise EditError(f"the essence prompt {prompt!r} has no {{}} in the place of the subject")

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> EditConfig:
        """Read what `dataclasses.asdict` made, also by way of JSON; numbers of other versions are left out."""
        known: dict[str, Any] = {field.name: numbers[field.name] for field in fields(cls) if field.name in numbers}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known)
