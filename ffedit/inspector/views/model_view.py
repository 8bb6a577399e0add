"""A whole model: one pass over a text, then every analysis of Geva et al. 2021 (arXiv 2012.14913) on its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.files.resuming import claimed
from ffedit.inference.corpus import Corpus
from ffedit.inspector.analyses import shallow
from ffedit.inspector.analyses.agreement import Surest, Values, read_values, surest
from ffedit.inspector.analyses.composition import CASES, Composed, compose
from ffedit.inspector.analyses.removal import REMOVED, removals
from ffedit.inspector.corpus_pass.memory_pass import Pass, Settings, collect, resumed
from ffedit.inspector.corpus_pass.rows import NOTHING, Context, RowStore, rows_of
from ffedit.inspector.distributions import Prefix
from ffedit.inspector.slots import Slot
from ffedit.inspector.views import report
from ffedit.inspector.views.report import CountedInterval, Measure, ModelReport, Shift, Sureness, interval
from ffedit.model.editable import Stack, check_model
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import decode
from ffedit.progress import Progress, silent

# Groups of random positions, in place of keys, on which chance is measured.
CHANCE_KEYS = 200
BINS = 10
EXAMPLES = 20
MOST_PREFIX = 160


class Removing(NamedTuple):
    """Keys of each layer, drawn with the seed, and first triggers of each that tokens are removed from.

    Every trigger costs three passes over its prefix.
    """

    keys: int = 20
    triggers: int = 10


def inspect_model(
    editable: Stack,
    corpus: Corpus,
    folder: Path | str,
    settings: Settings | None = None,
    removing: Removing | None = None,
    progress: Progress = silent,
) -> ModelReport:
    """Inspect all memories of a model: one pass over a text, which can be interrupted and resumed, and all analyses.

    Args:
        editable: the model, or a stack of one; what cannot be measured on a stack is None.
        corpus: the text; its documents where it has some, else rows of running text.
        folder: where triggers, rows and sample are stored; what is there already is not computed again.
        settings: settings of the pass.
        removing: numbers of keys and triggers that tokens are removed from.
        progress: progress callback.

    Raises:
        EditError: the text cannot be used, or the folder cannot be written, holds another pass, or is in use by
            another process.
        ModelError: the model has no unembedding.
    """
    check_model(editable)
    folder = Path(folder)
    about = {
        "model": editable.name,
        "stack": editable.kind,
        "fingerprint": fingerprint(editable),
        "corpus": str(corpus),
        "tokens": corpus.tokens,
        "settings": asdict(settings or Settings()),
    }
    with claimed(folder):
        state = resumed(editable, folder, about)
        store = collect(editable, rows_of(editable, corpus, progress), corpus.tokens, state, folder, progress)
    return analyse(editable, state, store, removing, progress)


def analyse(
    stack: Stack, state: Pass, store: RowStore, removing: Removing | None = None, progress: Progress = silent
) -> ModelReport:
    """Run every analysis on a finished pass of `stack`, which may be a merged one, and on the rows that it ran."""
    removing, seed, layers = removing or Removing(), state.settings.seed, range(len(stack.feed_forward))
    values = [read_values(stack, layer, state.triggers[layer], store, seed, progress) for layer in layers]
    composed = compose(stack, state.sample.values, [layer.top for layer in values])
    best = surest(values, store)
    numbers: dict[str, list[CountedInterval | None]] = {}
    for layer in layers:
        of_layer = {
            **_shallow(store, state, layer),
            **_removed(stack, layer, state, store, removing, progress),
            **_values(values[layer]),
            "surest_here": interval(double(best.layer == layer)),
            **_composed(composed[layer], stack.feed_forward[layer].d_ff),
        }
        for name, number in of_layer.items():
            numbers.setdefault(name, []).append(number)
    last = composed[-1]
    return ModelReport(
        model=state.about["model"],
        corpus=state.about["corpus"],
        tokens=state.tokens,
        rows=state.rows,
        layers=len(layers),
        memories=tuple(feed_forward.d_ff for feed_forward in stack.feed_forward),
        vocabulary=stack.vocabulary,
        settings={**state.about["settings"], "removing": removing._asdict()},
        measures=tuple(Measure.of(name, numbers[name]) for name in report.DEFINITIONS),
        sureness=_sureness(values) if store.layout.predicts_next else (),
        surest=_surest(stack, state, store, best),
        shifted=float(double(last.output != last.residual).mean()),
        shifts=_shifts(stack, state, store, last),
        stack=stack.kind,
        note=store.layout.note,
    )


def _shallow(store: RowStore, state: Pass, layer: int) -> dict[str, CountedInterval | None]:
    """Measure the shallow patterns of a layer's triggers, and those of random positions as chance."""
    positions = state.triggers[layer].positions.cpu()
    endings = shallow.endings(store, positions, state.text)
    covered = endings.covered
    chance = shallow.endings(store, _random(store, state, positions.shape[1], layer), state.text).covered
    return {
        "shallow": interval(covered),
        "shallow_last": interval(endings.by_last.sum(-1) / endings.count),
        "shallow_pair": interval(endings.by_pair.sum(-1) / endings.count),
        "shallow_keys": interval(double(covered[~covered.isnan()] >= shallow.SHALLOW)),
        "shallow_chance": interval(chance),
    }


def _random(store: RowStore, state: Pass, top: int, layer: int) -> Tensor:
    """Draw flat indices of the sample in groups of `top` different prefixes, [groups, top]."""
    different = list({store.context(position): position for position in state.sample.positions.tolist()}.values())
    rng = np.random.default_rng([state.settings.seed, layer])
    groups = [rng.choice(different, min(top, len(different)), replace=False) for _ in range(CHANCE_KEYS)]
    return torch.from_numpy(np.stack(groups)).long()


def _removed(
    stack: Stack, layer: int, state: Pass, store: RowStore, removing: Removing, progress: Progress
) -> dict[str, CountedInterval | None]:
    """Measure the relative change of coefficients without a token, over some keys of a layer."""
    if not stack.causal:
        return {f"removed_{name}": None for name in REMOVED}
    triggers, generator = state.triggers[layer], torch.Generator().manual_seed(state.settings.seed + layer)
    fired = (triggers.positions[:, 0] != NOTHING).nonzero()[:, 0].cpu()
    keys = fired[torch.randperm(len(fired), generator=generator)[: removing.keys]].tolist()
    prefixes = [[t.context.ids for t in triggers.read(store, key, removing.triggers)] for key in keys]
    changes = removals(stack, stack.feed_forward[layer], keys, prefixes, state.settings.seed)
    progress("removing tokens", layer + 1, len(stack.feed_forward))
    return {
        f"removed_{name}": interval([getattr(change, name) for change in changes if change is not None])
        for name in REMOVED
    }


def _values(values: Values) -> dict[str, CountedInterval | None]:
    followed = values.next != NOTHING
    return {
        "agreement": interval(double(values.agrees[followed])),
        "agreement_dealt": interval(double(values.permuted_agrees[followed])),
        "rank": interval(double(values.rank[followed]), np.median),
        "rank_dealt": interval(double(values.permuted_rank[followed]), np.median),
        "sure": interval(double(values.sure)),
    }


def _composed(layer: Composed, d_ff: int) -> dict[str, CountedInterval | None]:
    by_sign, by_norm, effective = double(layer.activity).unbind(1)
    cases = {f"case_{name.replace('-', '_')}": layer.case == number for number, name in enumerate(CASES)}
    return {
        "active_sign": interval(by_sign / d_ff),
        "active_norm": interval(by_norm / d_ff),
        "effective": interval(effective),
        "zero_agreement": interval(double(layer.zero)),
        "settled": interval(double(layer.settled)),
        "final": interval(double(layer.final)),
        **{name: interval(double(case)) for name, case in cases.items()},
    }


def _sureness(values: Sequence[Values]) -> tuple[Sureness, ...]:
    """Return agreement by deciles of the values' max p_i, over all layers."""
    sure, order = torch.cat([layer.sure[layer.keys] for layer in values]).sort()
    agrees = double(torch.cat([layer.agrees for layer in values]))[order]
    bins = []
    for decile, outcomes in zip(sure.tensor_split(BINS), agrees.tensor_split(BINS), strict=True):
        if (share := interval(outcomes)) is not None:
            bins.append(Sureness(float(decile[0]), float(decile[-1]), share.mean, share.low, share.high, share.count))
    return tuple(bins)


def _surest(stack: Stack, state: Pass, store: RowStore, best: Surest) -> report.Surest:
    """Return the agreement of the values of largest max p_i, the first of them as examples."""
    examples: list[dict[str, Any]] = []
    columns = (column[:EXAMPLES].tolist() for column in (best.layer, best.index, best.top, best.sure))
    for layer, index, top, sure in zip(*columns, strict=True):
        agreeing = (_text(stack, t.context) for t in state.triggers[layer].read(store, index) if t.next == top)
        examples.append(
            {
                "memory": str(Slot(*stack.feed_forward[layer].at(index))),
                "token": decode(stack.tokenizer, [top]),
                "probability": sure,
                "trigger": next(agreeing, None),
            }
        )
    agrees, any_agrees = (
        int(same.sum()) if store.layout.predicts_next else None for same in (best.agrees, best.any_agrees)
    )
    return report.Surest(len(best.sure), agrees, any_agrees, tuple(examples))


def _shifts(stack: Stack, state: Pass, store: RowStore, last: Composed) -> tuple[Shift, ...]:
    """Return the first positions of the sample, which is in random order, whose prediction the last layer changes."""
    shifts = []
    positions = state.sample.positions
    following = store.next(positions).tolist()
    for i in (last.output != last.residual).nonzero()[:EXAMPLES, 0].tolist():
        tops = [int(top[i]) for top in (last.residual, last.added, last.output)]
        residual, added, output = (decode(stack.tokenizer, [token]) for token in tops)
        next_token = None if following[i] == NOTHING else decode(stack.tokenizer, [following[i]])
        text = _text(stack, store.context(int(positions[i])))
        shifts.append(Shift(text, residual, added, output, next_token, CASES[int(last.case[i])]))
    return tuple(shifts)


def _text(stack: Stack, context: Context) -> str:
    """Decode the end of a prefix or, in a stack that is not causal, the text around the position, which is marked."""
    if not stack.causal:
        return Prefix.of(stack.tokenizer, *context).marked(MOST_PREFIX)
    text = decode(stack.tokenizer, context.ids)
    return text if len(text) <= MOST_PREFIX else "…" + text[-MOST_PREFIX:]
