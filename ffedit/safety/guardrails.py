"""Guardrails: signs that an edit is not needed, not safe, or not written, checked before it is shipped.

Each sign is a number with a limit. A breach is a sentence with the number, the limit and what to do; the command warns,
or with `--strict` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from rich.text import Text

from ffedit.algebra.key_moments import CONVERGED
from ffedit.algebra.linalg import double
from ffedit.algebra.rounding import lost_in_rounding
from ffedit.editor import Edit, applied_edits
from ffedit.errors import RequirementError
from ffedit.evaluator import Report
from ffedit.evaluator.verdict import DRIFTED, knew_previous, took
from ffedit.facts.fact import by_subject
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

# Limits from below; the others are from above.
AT_LEAST = ("division", "keys", "covered")


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a sign is a breach.

    Attributes:
        believed: share of facts whose new object is likelier than the old before the edit.
        unknown: share of facts whose old object the model does not generate before the edit.
        alike: cosine between the keys of two subjects, of this edit or of an earlier one in the model.
        norm_ratio: ‖Δ‖ / ‖W‖ of a layer, divided by the square root of the number of subjects written.
        division: k*ᵀC⁻¹k* relative to d_ff, its mean over ordinary text; small factors make huge updates.
        keys: number of keys C was collected from, relative to d_ff. Below 1, C is singular but for its ridge, which
            alone then determines what an edit may disturb.
        convergence: difference between the solutions from two halves of the text for C (`KeyMoments.convergence`).
        drift: KL divergence on generic text, nats per token.
        perplexity: the factor by which it rises on the same text.
        rounding: share of Δ (Frobenius norm) that is lost when the weights are rounded.
        covered: for a mixture, share of the router's weight on the written experts over contexts.
        moved: share of the facts' texts that are routed to other experts, in some layer, once the edit is in the model.
    """

    believed: float = 0.0
    unknown: float = 0.0
    alike: float = 0.95
    norm_ratio: float = 3.0
    division: float = 0.01
    keys: float = 1.0
    convergence: float = CONVERGED
    drift: float = DRIFTED
    perplexity: float = 1.1
    rounding: float = 0.1
    covered: float = 0.8
    moved: float = 0.1


@dataclass(frozen=True)
class Breach:
    """Limit that an edit breaks.

    Attributes:
        limit: its name, a field of `Limits`; or "sinks", of which there may be none.
        value: the measured number.
        words: what it means, and what to do.
    """

    limit: str
    value: float
    words: str


def breaches(editable: Editable, edit: Edit, report: Report, limits: Limits | None = None) -> list[Breach]:
    """List every limit that an edit breaks.

    Args:
        editable: the model that the edit was computed on, without it.
        edit: the edit.
        report: what was measured before and after it.
        limits: beyond which a sign is a breach.
    """
    limits = limits or Limits()
    signs = (
        *_before(report),
        *_sinks(edit),
        *(sign for at in edit.updates for sign in _layer(editable, edit, at, limits)),
        _most_alike(editable, edit, limits),
        *_routing(edit, limits),
        *_after(report, limits),
    )
    return [sign for sign in signs if not _within(sign, limits)]


def _within(sign: Breach, limits: Limits) -> bool:
    """Return True if a sign keeps its limit; NaN keeps none."""
    limit: float = getattr(limits, sign.limit, 0)
    return sign.value >= limit if sign.limit in AT_LEAST else sign.value <= limit


def warnings(broken: Sequence[Breach]) -> Text | None:
    """Format the breaches in `broken` that the verdict does not mention; None if there are none."""
    unmentioned = [breach.words for breach in broken if breach.limit not in ("believed", "unknown", "drift")]
    return Text("\n".join(f"Guardrail: {words}." for words in unmentioned), style="yellow") if unmentioned else None


def refusal(broken: Sequence[Breach]) -> RequirementError | None:
    """Return the error of `--strict`, or None if `broken` is empty."""
    words = "; ".join(breach.words for breach in broken)
    return RequirementError(f"--strict: {words}; no edit was saved") if broken else None


# The signs, each as a breach of its limit, which it may keep --------------------------------------


def _before(report: Report) -> Iterator[Breach]:
    facts = report.facts_before
    believed = sum(fact.scores.efficacy == 1 or took(fact) for fact in facts) / len(facts)
    yield Breach("believed", believed, f"{believed:.0%} of the new objects were believed before the edit")
    unknown = sum(not knew_previous(fact) for fact in facts) / len(facts)
    yield Breach("unknown", unknown, f"{unknown:.0%} of the old objects were not what the model said before the edit")


def _sinks(edit: Edit) -> Iterator[Breach]:
    sinks = [solved["subject"] for solved in edit.provenance.get("solved", ()) if solved.get("sinks")]
    if sinks:
        yield Breach(
            "sinks",
            len(sinks),
            f"{sinks[0]!r}{f' and {len(sinks) - 1} more subjects' if len(sinks) > 1 else ''}: one token, which is an "
            "attention sink where it begins a text, so that a change there would reach every text; it is written only "
            "where something stands before it. Put words before it in the prompt, or take --layers 0",
        )


def _layer(editable: Editable, edit: Edit, at: Address, limits: Limits) -> Iterator[Breach]:
    """Yield the signs of the update of one memory."""
    about, memory = edit.provenance, editable.memories[at]
    W = double(memory.value)
    change = double(edit.updates[at].dense).to(W.device)
    ratio = float(change.norm() / W.norm()) / len(by_subject(edit.facts)) ** 0.5
    yield Breach(
        "norm_ratio",
        ratio,
        f"in layer {at} ‖Δ‖/‖W‖ is {ratio:.2g} per root of a subject (limit {limits.norm_ratio:g}): other text "
        "will suffer; try another layer, or more value.weight_decay",
    )
    lost = 0.0 if memory.quantised else lost_in_rounding(W, change, memory.saved_dtype)
    yield Breach(
        "rounding",
        lost,
        f"in layer {at} {lost:.0%} of Δ is lost in {str(memory.saved_dtype).removeprefix('torch.')} (limit "
        f"{limits.rounding:.0%}): export it as an adapter (--format adapter), which keeps all of it, or onto a float32 "
        "base",
    )
    division = min(about.get("division", {}).get(str(at), [memory.d_ff])) / memory.d_ff
    yield Breach(
        "division",
        division,
        f"in layer {at} a key has the division factor {division:.2g} of d_ff (limit {limits.division:g}): it "
        "is nearly a key of ordinary text; try another layer",
    )
    statistics = about.get("statistics", {}).get(str(at), {})
    # Edits of early versions record the tokens only; a dense layer has one key per token.
    keys = statistics.get("keys", statistics.get("tokens"))
    if keys is not None:
        tokens = ceil(statistics.get("tokens", keys) * memory.d_ff * limits.keys / max(keys, 1))
        yield Breach(
            "keys",
            keys / memory.d_ff,
            f"in layer {at} C is of {keys:,} keys, {keys / memory.d_ff:.2g} of d_ff (limit {limits.keys:g}): too "
            f"few to tell which directions text uses; {_collect(tokens)}",
        )
    convergence = statistics.get("convergence")
    if convergence is not None:
        yield Breach(
            "convergence",
            convergence,
            f"in layer {at} two halves of the text for C solve {convergence:.2g} apart (limit "
            f"{limits.convergence:g}): other text is disturbed more than it had to be; "
            f"{_collect(2 * statistics['tokens'])}",
        )


def _collect(tokens: int) -> str:
    return f"collect more (`ffedit stats --tokens {tokens} --out DIR`) and give them (--stats DIR)"


def _most_alike(editable: Editable, edit: Edit, limits: Limits) -> Breach:
    """Find the largest cosine of a key of this edit with another subject's key, of it or of an applied edit."""
    most, pair = 0.0, ("", "")
    for at, keys in edit.keys.items():
        own = edit.subjects(at)
        if not own:
            continue  # fine-tuned: no keys
        earlier = [other for other in applied_edits(editable) if other.subjects(at)]
        columns = [keys, *(other.keys[at] for other in earlier)]
        names = own + [subject for other in earlier for subject in other.subjects(at)]
        unit = torch.nn.functional.normalize(double(torch.cat(columns, 1)), dim=0)
        cosine = unit[:, : len(own)].T @ unit
        for i, name in enumerate(own):
            cosine[i, [j for j, other_name in enumerate(names) if other_name == name]] = 0
        value, index = cosine.flatten().max(0)
        if float(value) > most:
            row, column = divmod(int(index), len(names))
            most, pair = float(value), (own[row], names[column])
    return Breach(
        "alike",
        most,
        f"the keys of {pair[0]!r} and {pair[1]!r} have the cosine {most:.2f} (limit {limits.alike:g}): what is "
        "written for one reaches the other; check both",
    )


def _routing(edit: Edit, limits: Limits) -> Iterator[Breach]:
    for layer, shares in edit.provenance.get("routing", {}).items():
        covered, moved = shares.get("covered", 1.0), shares["moved"]
        yield Breach(
            "covered",
            covered,
            f"in layer {layer} the written experts hold {covered:.0%} of the router's weight over "
            f"contexts (limit {limits.covered:.0%}): elsewhere the edit may not be read; try another layer",
        )
        yield Breach(
            "moved",
            moved,
            f"in layer {layer} {moved:.0%} of the facts' texts go to other experts after the edit (limit "
            f"{limits.moved:.0%}): look at what else changed, or try another layer",
        )


def _after(report: Report, limits: Limits) -> Iterator[Breach]:
    after, before = report.after, report.before
    if after is not None and (drift := after.drift) is not None:
        yield Breach("drift", drift, f"generic text drifts by {drift:.2g} nats per token (limit {limits.drift:g})")
    if after is not None and after.perplexity is not None and before.perplexity is not None:
        factor = after.perplexity / before.perplexity
        yield Breach(
            "perplexity",
            factor,
            f"perplexity of generic text rises by the factor {factor:.2f} (limit {limits.perplexity:g})",
        )
