"""Map the sites of a fact: how far a change written there reaches its subject, and how much of it leaks to other names.

A site is a token and a layer. The smallest change that stores a fact at it is Δ = δ uᵀ (ROME, arXiv 2202.05262, eq. 2),

    u = C⁻¹k* / (k*ᵀ C⁻¹ k*)

with the key k* read there and the metric C of the layer; u is also orthogonal to kept keys (`updates.direction`). A
text receives (uᵀk) δ wherever a key k is read. So what an edit does to other texts is known from keys alone, before
any value is chosen:

    reach   uᵀk at the same token of the subject, in sentences in which k* was not read; 1 is the whole change
    leak    |uᵀk| in mentions of other names, at the token of each that receives most; 0 is no leak

The other property of a site is its *effect*, the share of the answer that comes back when its clean output is restored
(`locator`). k*, C and the kept keys are those of an edit of this fact alone, with one difference: names that are
measured do not count in C (`look_alikes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import double
from ffedit.algebra.updates import direction
from ffedit.editor.config import EditConfig
from ffedit.editor.key import PromptSet, build_prompts, read_keys, read_layers, without_sinks
from ffedit.editor.methods import check_config
from ffedit.editor.metric import metric
from ffedit.editor.name_keys import NameMoment, mention_of, name_moments, names_for, read_names
from ffedit.editor.protect import beginning_keys, protected_texts
from ffedit.editor.statistics import by_layer, in_cache, moments_for, text_for
from ffedit.editor.target_layers import find_ff_layers
from ffedit.errors import EditError, FactError
from ffedit.facts.fact import Fact, FactLike, as_facts
from ffedit.facts.text import counted, number
from ffedit.inference.batching import refuse_out_of_memory
from ffedit.inference.corpus import Corpus
from ffedit.inference.names import alike, mention
from ffedit.layer_choice.look_alikes import look_alikes, measured_names, neighbor_subjects
from ffedit.layer_choice.published import auto_layer
from ffedit.locator.result import Effects, save_arrays
from ffedit.locator.trace import resolve_layers
from ffedit.model.editable import Editable, check_model
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address
from ffedit.model.tokenization import LETTER, Encoded, decode
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

# Beginnings of the sentences in which a subject's reach is measured; k* is never read after one of these.
CARRIERS = (
    "People often ask about",
    "In this chapter we turn to",
    "My friend wrote a letter about",
    "There is a photograph of",
    "Nobody in the room had mentioned",
    "The newspaper printed a long report on",
    "For many years,",
)
# Largest numbers of other names that are measured, of built-in look-alikes, and of neighbors' subjects.
OTHERS, LOOK_ALIKES, NEIGHBORS = 300, 10, 20
# Number of look-alikes in `SiteMap.hit`, and the quantile that `leak_high` is.
MOST_HIT = 5
HIGH = 0.95


@dataclass(frozen=True, eq=False)
class SiteMap(Displayed):
    """Reach and leak of each site of a fact; the axes are those of `Trace.effects`.

    Attributes:
        reach: mean over other sentences of uᵀk at the same token of the subject, [layers, tokens]: the share of the
            change that the subject receives there. NaN at layers that were not measured, and at tokens that are not the
            subject's, or that the subject does not have in every text of the edit.
        reach_least: the least of these shares, [layers, tokens].
        leak: mean of |uᵀk| over other names, [layers, tokens].
        leak_high: the 95th percentile of |uᵀk| over the same names, [layers, tokens].
        leak_look_alikes: mean of |uᵀk| over look-alikes of the subject, [layers, tokens].
        hit: the look-alikes that receive most, the most first, [layers, tokens, 5]; "" where there are fewer.
        hit_by: uᵀk of each name in `hit`, [layers, tokens, 5]; NaN where there are fewer.
        layers: layers that were measured, ascending.
        tokens: the prompt's tokens as text, [tokens].
        subject: position of the subject's first token, and the one after its last.
        names: number of other names that were measured.
        look_alikes: the look-alikes, for each of `layers`: the neighbors' subjects, names that end with the subject's
            last word, and names whose keys are most alike to the subject's there.
        prompt: the prompt as text.
    """

    reach: Effects
    reach_least: Effects
    leak: Effects
    leak_high: Effects
    leak_look_alikes: Effects
    hit: np.ndarray[tuple[int, ...], np.dtype[np.str_]]
    hit_by: Effects
    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    subject: tuple[int, int]
    names: int
    look_alikes: tuple[tuple[str, ...], ...]
    prompt: str

    def __repr__(self) -> str:
        layer, position = self.least
        site = f"{self.tokens[position]!r}, layer {layer}"
        leak, reach = (number(float(values[layer, position])) for values in (self.leak_look_alikes, self.reach))
        return (
            f"SiteMap of {self.prompt!r}, layers {list(self.layers)}, {counted(self.names, 'other name')}\n"
            f"  least leak to look-alikes at {site}: {leak}, reach {reach}"
        )

    @property
    def least(self) -> tuple[int, int]:
        """Layer and position of the site that leaks least to look-alikes; the first layer if there are none."""
        leaks = np.where(np.isnan(self.leak_look_alikes), np.inf, self.leak_look_alikes)
        if np.isinf(leaks).all():
            return self.layers[0], self.subject[1] - 1
        layer, position = divmod(int(leaks.argmin()), len(self.tokens))
        return layer, position

    def hits(self, layer: int, position: int) -> list[tuple[str, float]]:
        """Return the look-alikes that receive most of an edit at a site, with uᵀk, the most first."""
        pairs = zip(self.hit[layer, position].tolist(), self.hit_by[layer, position].tolist(), strict=True)
        return [(name, received) for name, received in pairs if name]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, in full precision."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}

    def save(self, path: str | Path) -> None:
        """Write the numbers as `.npz`; the array `axes` names the axes of those that have them."""
        values = {name: value for name, value in self.to_dict().items() if name != "look_alikes"}
        save_arrays(Path(path), ("layer", "token"), values)


def site_map(
    editable: Editable,
    fact: FactLike,
    *,
    layers: int | Iterable[int] | None = None,
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    progress: Progress = silent,
) -> SiteMap:
    """Measure reach and leak of the sites of a fact, in forward passes only; the model stays as it is.

    Args:
        editable: the model.
        fact: one fact; its target is not needed.
        layers: the layers to measure; None for those whose statistics are in the cache or in `stats`, or, if there are
            none, the layer that `auto` takes and its neighbours, whose statistics are then collected.
        config: hyperparameters of the edit; k*, C and the kept keys depend on its `prompts` and `key`. Each token of
            the subject is measured, whatever `key.fact_token` is.
        stats: second moments of the keys, or the text to collect them on; by default as for `ffedit.edit`.
        progress: called with the progress.

    Raises:
        FactError: the fact does not fit the model, or layers are not there.
        EditError: statistics do not fit or cannot be collected.
    """
    check_model(editable)
    FactError.require(fact, (Fact, Mapping), "one fact was expected")
    config = config or EditConfig()
    check_config(config)
    EditError.require(stats, (Corpus, Mapping, NoneType), "a text or its statistics were expected: ffedit.Corpus(path)")
    (fact,) = as_facts(fact)
    stats = text_for(editable, 1, config.seed, names=config.key.names_weight > 0) if stats is None else stats
    chosen = _layers(editable, layers, stats)
    # Encoded as in a trace, so that the tokens are the same.
    prompt = editable.encode(fact.text, fact.previous or "", fact.span, editable.max_tokens)
    refusal = EditError("not enough memory for the sites of a fact; map fewer layers, or use another --device")
    with refuse_out_of_memory(refusal):
        sites = _solve(editable, fact, chosen, config, stats, progress)
        return _measure(editable, fact, prompt, sites)


def _layers(
    editable: Editable, layers: int | Iterable[int] | None, stats: Corpus | Mapping[Address, KeyMoments]
) -> tuple[int, ...]:
    """Return the layers to measure."""
    depth = len(editable.layers)
    if layers is not None:
        return resolve_layers(depth, layers)
    addresses = in_cache(editable, editable.memories.values(), stats) if isinstance(stats, Corpus) else stats
    auto = auto_layer(editable).layer
    with_stats = sorted({at.layer for at in addresses if at in editable.memories})
    return tuple(with_stats or range(max(0, auto - 1), min(depth, auto + 2)))


# Keys and their directions -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Site:
    """Site as the editor would write to it."""

    ff: FeedForward  # the memories that it would write to
    token: int  # token of the subject, counted from −1 at its end
    key: Tensor  # k*, [Σ d_ff], float64
    u: Tensor  # `updates.direction` of the key, [Σ d_ff], float64


def _solve(
    editable: Editable,
    fact: Fact,
    layers: Sequence[int],
    config: EditConfig,
    stats: Corpus | Mapping[Address, KeyMoments],
    progress: Progress,
) -> list[_Site]:
    """Read the key of each site as an edit would, and solve for its direction."""
    prompt_sets = _prompt_sets(editable, fact, config)
    targets = [
        (find_ff_layers(editable, [layer], [prompts])[0], token, prompts)
        for layer in layers
        for token, prompts in prompt_sets.items()
    ]
    memories = {memory.address: memory for ff, *_ in targets for memory in ff.memories}
    moments = moments_for(editable, list(memories.values()), stats, 1, config.seed, progress)
    whole = by_layer(editable, memories)
    among = names_for(1)
    if config.key.names_weight:
        read_names(editable, whole, among)  # all layers in one pass; cached for the calls below
    protected = protected_texts(editable, [fact], replace(config.key, fact_token="subject_last"))
    kept_by_layer = [] if protected is None else [protected.keys(editable, whole)]
    kept_by_layer += [beginning_keys(editable, whole)] if config.key.keep_beginning else []
    kept: dict[Address, Tensor] = {}
    for ff in whole if kept_by_layer else ():
        kept |= ff.split(torch.cat([keys[ff.layer] for keys in kept_by_layer], 1), 0)
    subjects, left_out = [fact.subject, *neighbor_subjects(fact)], frozenset(measured_names())
    of_names: dict[tuple[Address, ...], NameMoment | None] = {}
    sites = []
    for i, (ff, token, prompts) in enumerate(targets):
        addresses = tuple(memory.address for memory in ff.memories)
        if addresses not in of_names:
            names = name_moments(editable, [ff], subjects, config.key, left_out, among)
            of_names[addresses] = names.get(ff.layer)
        keys = read_keys(editable, ff, without_sinks(editable, ff, [prompts]))
        spread = keys.context_spread(config.key.context_weight)
        C = metric([moments[at] for at in addresses], spread, of_names[addresses])
        kept_keys = torch.cat([kept[at] for at in addresses]).to(keys.K) if kept else None
        sites.append(_Site(ff, token, keys.K[:, 0], direction(keys.K[:, 0], C, kept_keys)))
        progress("mapping sites", i + 1, len(targets))
    return sites


def _prompt_sets(editable: Editable, fact: Fact, config: EditConfig) -> dict[int, PromptSet]:
    """Return the prompts of an edit at each subject token that all texts have, counted from −1 at the subject's end."""
    if fact.target is None:  # no key depends on the answer
        fact = replace(fact, target=fact.previous or LETTER, previous=None)

    def prompt_set(token: int) -> PromptSet:
        return build_prompts(editable, [[fact]], replace(config, key=replace(config.key, fact_token=token)))[0]

    last = prompt_set(-1)
    count = min(len(text.ends) for text in (*last.texts, *last.mentions))
    return {-1: last, **{token: prompt_set(token) for token in range(-2, -count - 1, -1)}}


# What other texts receive --------------------------------------------------------------------------


def _measure(editable: Editable, fact: Fact, prompt: Encoded, sites: Sequence[_Site]) -> SiteMap:
    """Read keys of the subject in other sentences, and of other names, in one pass, and build the map."""
    whole = by_layer(editable, {memory.address for site in sites for memory in site.ff.memories})
    others = [name for name in measured_names() if not alike(name, fact.subject)][:OTHERS]
    similar = _look_alikes(editable, fact, whole, sites)
    sentences = {site.token: _sentences(editable, fact.subject, site.token) for site in sites}
    named = {name: _at_each_token(editable, name) for name in dict.fromkeys([*others, *chain(*similar.values())])}
    texts = [*sentences.values(), *named.values()]
    read = read_layers(editable, whole, list(chain(*texts)))
    keys = {ff.layer: ff.split(layer_keys, 1) for ff, (layer_keys, _) in zip(whole, read, strict=True)}

    assert prompt.subject is not None
    shape = len(editable.layers), prompt.answer
    shares = ("reach", "reach_least", "leak", "leak_high", "leak_look_alikes")
    arrays: dict[str, Any] = {name: np.full(shape, np.nan) for name in shares}
    arrays |= {"hit": np.full((*shape, MOST_HIT), "", object), "hit_by": np.full((*shape, MOST_HIT), np.nan)}
    for site in sites:
        received = double(site.ff.joined(keys[site.ff.layer]).to(site.u.device)) @ site.u
        by_text = dict(zip([*sentences, *named], received.cpu().split([len(group) for group in texts]), strict=True))
        most = {name: float(values[values.abs().argmax()]) for name in named if len(values := by_text[name])}
        alike_ones = {name: most[name] for name in similar[site.ff.layer] if name in most}
        summary = _summary(by_text[site.token], [most[name] for name in others if name in most], alike_ones)
        for name, value in summary.items():
            arrays[name][site.ff.layer, prompt.subject[1] + site.token] = value
    return SiteMap(
        **{**arrays, "hit": arrays["hit"].astype(str)},
        layers=tuple(ff.layer for ff in whole),
        tokens=tuple(decode(editable.tokenizer, [i]) for i in prompt.ids[: prompt.answer]),
        subject=prompt.subject,
        names=sum(bool(named[name]) for name in others),
        look_alikes=tuple(tuple(name for name in similar[ff.layer] if named[name]) for ff in whole),
        prompt=fact.text,
    )


def _summary(subject: Tensor, others: Sequence[float], look_alikes: Mapping[str, float]) -> dict[str, Any]:
    """Return the entries of a site, from uᵀk of the subject's sentences, of other names and of look-alikes."""
    leaks, near = np.abs(others), sorted(look_alikes.items(), key=lambda pair: -abs(pair[1]))
    hit = near[:MOST_HIT] + [("", np.nan)] * (MOST_HIT - len(near))
    return {
        "reach": float(subject.mean()) if len(subject) else np.nan,
        "reach_least": float(subject.min()) if len(subject) else np.nan,
        "leak": leaks.mean() if len(leaks) else np.nan,
        "leak_high": np.quantile(leaks, HIGH) if len(leaks) else np.nan,
        "leak_look_alikes": float(np.mean([abs(received) for _, received in near])) if near else np.nan,
        "hit": [name for name, _ in hit],
        "hit_by": [received for _, received in hit],
    }


def _look_alikes(
    editable: Editable, fact: Fact, whole: Sequence[FeedForward], sites: Sequence[_Site]
) -> dict[int, list[str]]:
    """Choose look-alikes for each layer: the neighbors' subjects, and built-in names."""
    near, read = neighbor_subjects(fact)[:NEIGHBORS], read_names(editable, whole)
    last = {site.ff.layer: site for site in sites if site.token == -1}
    chosen = {}
    for ff in whole:
        known = read[ff.layer]
        keys = last[ff.layer].ff.joined(ff.split(known.keys, 1))
        built_in = look_alikes(fact.subject, known.names, keys, last[ff.layer].key, LOOK_ALIKES)
        chosen[ff.layer] = list(dict.fromkeys([*near, *built_in]))
    return chosen


def _sentences(editable: Editable, subject: str, token: int) -> list[Encoded]:
    """Encode other sentences about a subject, except those that lack this token of it or are too long for the model."""
    texts = [mention(editable, subject, carrier, token) for carrier in CARRIERS]
    return [text for text in texts if len(text.ends) >= -token and len(text.ids) <= editable.max_tokens]


def _at_each_token(editable: Editable, name: str) -> list[Encoded]:
    """Encode the mention of a name, once for each of its tokens; none where it has no token."""
    text = mention_of(editable, name, len(name))  # any of the mentions, the same one each time
    return [] if text is None else [replace(text, fact_token=i) for i in range(len(text.ends))]
