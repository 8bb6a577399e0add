"""Guardrails: what should stop an edit from being shipped.

A guardrail is a number with a limit. A breach is a sentence with the number, the limit and what to do; the command
warns, or with `--strict` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeAlias

import torch
from rich.text import Text

from ffedit.algebra.linalg import double
from ffedit.algebra.rounding import lost_in_rounding
from ffedit.editor.edit import Edit, applied_edits
from ffedit.errors import RequirementError
from ffedit.evaluator import Report
from ffedit.evaluator.verdict import DRIFTED, knew_previous, took
from ffedit.facts.fact import by_subject
from ffedit.facts.text import counted
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

AT_LEAST = ("division", "keys", "covered")  # these limits are lower ones, all others upper ones
COLLECT = "collect more (`ffedit stats --tokens {tokens} --out DIR`) and use it (--stats DIR)"
# By limit: the finding, then the number with the limit, and what to do.
WORDS = {
    "believed": ("the model believed new objects before the edit", "{value:.0%} of them"),
    "unknown": ("the model did not say old objects before the edit", "{value:.0%} of them"),
    "sinks": (
        "the edited token of {subject!r}{more} is an attention sink where it begins a text",
        "a change there would reach every text, so it is written only where other text stands before it. Put words "
        "before it in the prompt, or use --layers 0",
    ),
    "norm_ratio": (
        "the change of layer {at} is so large that other text will suffer",
        "‖Δ‖/‖W‖ over the root of the number of subjects is {value:.2g} (limit {limit:g}); try another layer, or more "
        "value.weight_decay",
    ),
    "rounding": (
        "in layer {at} {dtype} rounds part of the change away",
        "{value:.0%} of Δ is lost (limit {limit:.0%}); export it as an adapter (--format adapter), which keeps all of "
        "it, or onto a float32 base",
    ),
    "division": (
        "in layer {at} a key is nearly a key of ordinary text",
        "its division factor is {value:.2g} of d_ff (limit {limit:g}); try another layer",
    ),
    "keys": (
        "in layer {at} C has too few keys to show which directions text uses",
        f"{{keys:,}} keys, {{value:.2g}} of d_ff (limit {{limit:g}}); {COLLECT}",
    ),
    "convergence": (
        "in layer {at} C is under-sampled",
        f"with more text for C, the edit would disturb other text {{value:.0%}} less (limit {{limit:.0%}}); {COLLECT}",
    ),
    "alike": (
        "{subject!r} and {other!r} have nearly the same key",
        "their cosine is {value:.2f} (limit {limit:g}), so a change for one reaches the other; check both",
    ),
    "covered": (
        "in layer {at} other experts than the edited ones may be used",
        "the edited ones get {value:.0%} of the router's weight over contexts (limit {limit:.0%}); try another layer",
    ),
    "moved": (
        "in layer {at} texts of the facts go to other experts after the edit",
        "{value:.0%} of them (limit {limit:.0%}); check the other scores, or try another layer",
    ),
    "drift": ("generic text drifts", "by {value:.2g} nats per token (limit {limit:g})"),
    "perplexity": (
        "generic text has become less likely",
        "perplexity rises by the factor {value:.2f} (limit {limit:g})",
    ),
}
Sign: TypeAlias = tuple[str, float, dict[str, Any]]  # a limit, the number to compare with it, more values for its words


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a sign is a breach."""

    believed: float = 0.0  # share of facts whose new object is likelier than the old before the edit
    unknown: float = 0.0  # share of facts whose old object the model does not generate before the edit
    alike: float = 0.95  # cosine between the keys of two subjects, of this edit or of an earlier one in the model
    norm_ratio: float = 3.0  # ‖Δ‖ / ‖W‖ of a layer, divided by the square root of the number of subjects written
    # k*ᵀC⁻¹k* relative to its mean over ordinary text, d_ff (of all written experts); small ones make huge updates
    division: float = 0.01
    # number of keys C was collected from, relative to d_ff. Below 1, C is singular but for its ridge and the keys of
    # names; from half on, scores of Qwen2.5-Coder 1.5B lose nothing (docs/scale.md, "Fewer tokens")
    keys: float = 0.4
    # share of what the edit adds to other text that a C from endless text would avoid (`KeyMoments.convergence`); at
    # .21, scores of the same model lose nothing
    convergence: float = 0.25
    drift: float = DRIFTED  # KL divergence on generic text, nats per token
    perplexity: float = 1.1  # factor by which the perplexity of generic text rises
    rounding: float = 0.1  # share of Δ (Frobenius norm) that is lost when the weights are rounded
    covered: float = 0.8  # for a mixture, share of the router's weight on the written experts over contexts
    # share of the facts' texts that are routed to other experts, in some layer, once the edit is in the model
    moved: float = 0.1


@dataclass(frozen=True)
class Breach:
    """Limit that an edit breaks."""

    limit: str  # its name, a field of `Limits`; or "sinks", where none is allowed
    value: float  # the measured number
    finding: str  # what it means, a few words
    numbers: str  # the number with its limit, and what to do

    @property
    def words(self) -> str:
        """Return the finding with its numbers."""
        return f"{self.finding}: {self.numbers}"


def breaches(editable: Editable, edit: Edit, report: Report, limits: Limits | None = None) -> list[Breach]:
    """List every limit that an edit breaks, by what `report` measured before and after it; `editable` is without it."""
    limits, broken = limits or Limits(), []
    for name, value, details in _signs(editable, edit, report, limits):
        limit: float = getattr(limits, name, 0)
        if not (value >= limit if name in AT_LEAST else value <= limit):  # NaN breaks every limit
            finding, numbers = (words.format(value=value, limit=limit, **details) for words in WORDS[name])
            broken.append(Breach(name, value, finding, numbers))
    return broken


def warnings(broken: Sequence[Breach], numbers: bool = True) -> Text | None:
    """Format the breaches that the verdict does not mention, with their numbers or without; None if there are none."""
    rest = [breach for breach in broken if breach.limit not in ("believed", "unknown", "drift")]
    lines = [f"Guardrail: {breach.words if numbers else breach.finding}." for breach in rest]
    return Text("\n".join(lines), style="yellow") if lines else None


def refusal(broken: Sequence[Breach]) -> RequirementError | None:
    """Return the error of `--strict`, or None if `broken` is empty."""
    words = "; ".join(breach.words for breach in broken)
    return RequirementError(f"--strict: {words}; no edit was saved") if broken else None


def _signs(editable: Editable, edit: Edit, report: Report, limits: Limits) -> Iterator[Sign]:
    before, after, facts = report.before, report.after, report.facts_before
    yield "believed", sum(fact.scores.efficacy == 1 or took(fact) for fact in facts) / len(facts), {}
    yield "unknown", sum(not knew_previous(fact) for fact in facts) / len(facts), {}
    sinks = [solved["subject"] for solved in edit.provenance.get("solved", ()) if solved.get("sinks")]
    if sinks:
        more = f" and {counted(len(sinks) - 1, 'more subject')}" if len(sinks) > 1 else ""
        yield "sinks", len(sinks), {"subject": sinks[0], "more": more}
    for at in edit.updates:
        yield from _signs_of_layer(editable, edit, at, limits)
    yield _most_alike(editable, edit)
    for layer, shares in edit.provenance.get("routing", {}).items():
        yield "covered", shares.get("covered", 1.0), {"at": layer}
        yield "moved", shares["moved"], {"at": layer}
    if after is not None and after.drift is not None:
        yield "drift", after.drift, {}
    if after is not None and after.perplexity is not None and before.perplexity is not None:
        yield "perplexity", after.perplexity / before.perplexity, {}


def _signs_of_layer(editable: Editable, edit: Edit, at: Address, limits: Limits) -> Iterator[Sign]:
    provenance, memory = edit.provenance, editable.memories[at]
    W = double(memory.value)
    change = double(edit.updates[at].dense).to(W.device)
    yield "norm_ratio", float(change.norm() / W.norm()) / len(by_subject(edit.facts)) ** 0.5, {"at": at}
    lost = 0.0 if memory.quantised else lost_in_rounding(W, change, memory.saved_dtype)
    yield "rounding", lost, {"at": at, "dtype": str(memory.saved_dtype).removeprefix("torch.")}
    d_ff = sum(editable.memories[other].d_ff for other in edit.updates if other.layer == at.layer)
    yield "division", min(provenance.get("division", {}).get(str(at), [d_ff])) / d_ff, {"at": at}
    statistics = provenance.get("statistics", {}).get(str(at), {})
    if (keys := statistics.get("keys")) is not None:
        tokens = ceil(statistics["tokens"] * memory.d_ff * limits.keys / max(keys, 1))
        yield "keys", keys / memory.d_ff, {"at": at, "keys": keys, "tokens": tokens}
    if (convergence := statistics.get("convergence")) is not None:
        yield "convergence", convergence, {"at": at, "tokens": 2 * statistics["tokens"]}


def _most_alike(editable: Editable, edit: Edit) -> Sign:
    """Find the largest cosine of a key of this edit with another subject's key, of this edit or an applied one."""
    largest, pair = 0.0, ("", "")
    for at, keys in edit.keys.items():
        subjects = edit.subjects(at)
        if not subjects:
            continue  # fine-tuned: no keys
        earlier = [other for other in applied_edits(editable) if other.subjects(at)]
        columns = [keys, *(other.keys[at] for other in earlier)]
        names = subjects + [subject for other in earlier for subject in other.subjects(at)]
        unit = torch.nn.functional.normalize(double(torch.cat(columns, 1)), dim=0)
        cosine = unit[:, : len(subjects)].T @ unit
        for i, name in enumerate(subjects):
            cosine[i, [j for j, other_name in enumerate(names) if other_name == name]] = 0
        value, index = cosine.flatten().max(0)
        if float(value) > largest:
            row, column = divmod(int(index), len(names))
            largest, pair = float(value), (subjects[row], names[column])
    return "alike", largest, {"subject": pair[0], "other": pair[1]}
