"""Read the keys of many names, which C of running text hardly covers.

An update adds (uᵀk) δ wherever a key k is read, with u = C⁻¹k* / (k*ᵀ C⁻¹ k*). Few tokens of running text end a name,
and most of these names are frequent, so that C spares words first, and names like the subject's receive much of its δ.
So the metric of an edit counts text and names,

    C' = C + w/n Σ k kᵀ   over the last tokens of n names, a thousand or more, each mentioned once

ROME and MEMIT take C from Wikipedia's text, which is full of names (arXiv 2202.05262, appendix E.2); here names
have a weight of their own, whatever the text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from ffedit.algebra.linalg import Moment, diagonal, double
from ffedit.editor.config import KeyConfig
from ffedit.editor.edit import unedited
from ffedit.editor.key import read_layers
from ffedit.errors import EditError, FactError
from ffedit.files import cache
from ffedit.files.resuming import load_state, save_state
from ffedit.inference.names import MENTIONS, alike, mention, names
from ffedit.inference.precision import averaging_dtype, computed_in
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import Encoded

THIRD, BLOCK = 3, 256  # for one subject, every third name counts; rows of a moment that are added at once


def names_for(subjects: int) -> tuple[str, ...]:
    """Return the names that count in an edit of so many subjects: for one, every third built-in name.

    Scores do not depend on the rest, which takes long to read (docs/scale.md, "Fewer tokens").
    """
    return names()[::THIRD] if subjects == 1 else names()


@dataclass(frozen=True, eq=False)
class NameMoment:
    """Weighted second moment of a layer's keys of other names.

    Each of n names has the weight w / n, however many are left out, so that a name adds the same to C for any subject.
    """

    ff: FeedForward
    known: NameKeys
    weight: float  # weight of each name
    which: Sequence[int]  # indices of the names left out: like a fact's subject, or excluded by caller or config

    @property
    def count(self) -> int:
        """Number of names that count."""
        return len(self.known.names) - len(self.which)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names that do not count."""
        return tuple(self.known.names[i] for i in self.which)

    def add_all_to_(self, C: Tensor) -> None:
        """Add the moment of all names to C of a layer's single memory, in place, without another matrix of its size."""
        (keys,) = self._keys()
        for rows, columns in zip(C.split(BLOCK), keys.split(BLOCK, 1), strict=True):
            rows.add_(double(columns.T @ keys), alpha=self.weight)

    def _keys(self) -> list[Tensor]:
        """Return the keys of all names in each memory, float32, on the device where the layer is solved."""
        return [keys.float().to(self.ff.solve_device) for keys in self.known.keys.split(self.ff.sizes, 1)]

    @property
    def rows(self) -> Tensor:
        """Rows A of the names left out, [left out, Σ d_ff]: AᵀA is subtracted from the moment of all names."""
        left_out = self.known.keys[list(self.which)].to(self.ff.solve_device)
        return double(left_out) * math.sqrt(self.weight)

    @cached_property
    def moment(self) -> Moment:
        """Moment of the names that count, [Σ d_ff, Σ d_ff], float64, on the device where the layer is solved."""
        blocks = []
        for keys, left_out in zip(self._keys(), self.rows.split(self.ff.sizes, 1), strict=True):
            block = double(keys.T @ keys).mul_(self.weight).addmm_(left_out.T, left_out, alpha=-1)
            blocks.append(block if self.count else block.zero_())  # without names only rounding errors would remain
        return diagonal(blocks)


def name_moments(
    editable: Editable,
    ff_layers: Sequence[FeedForward],
    subjects: Sequence[str],
    config: KeyConfig,
    left_out: Collection[str] = (),
    among: Sequence[str] | None = None,
) -> dict[int, NameMoment]:
    """Return the moment of names by layer; empty where names have no weight.

    Names that contain one of `subjects`, or are part of one, do not count, nor do those in `left_out`. `among` are the
    names to read, None for all built-in ones.
    """
    if not config.names_weight:
        return {}
    excluded, moments = (*subjects, *config.without_names), {}
    keys_by_layer = read_names(editable, ff_layers, among)
    all_names = {name for layer_keys in keys_by_layer.values() for name in layer_keys.names}
    uncounted = {name for name in all_names if name in left_out or any(alike(name, other) for other in excluded)}
    for ff in ff_layers:
        layer_keys = keys_by_layer[ff.layer]
        which = [i for i, name in enumerate(layer_keys.names) if name in uncounted]
        moments[ff.layer] = NameMoment(ff, layer_keys, config.names_weight / max(1, len(layer_keys.names)), which)
    return moments


@dataclass(frozen=True, eq=False)
class NameKeys:
    """Keys of names in one layer of the unedited model.

    They are kept in bfloat16: rounding them changes their moment by less than one name does.
    """

    names: Sequence[str]  # without names that have no token of their own
    keys: Tensor  # [names, Σ d_ff], bfloat16
    mark: str  # identifies the model, the layer and the names


def read_names(
    editable: Editable,
    ff_layers: Sequence[FeedForward],
    among: Sequence[str] | None = None,
) -> dict[int, NameKeys]:
    """Return the keys of the names `among`, None for all built-in ones, by layer, in the unedited model.

    They come from the cache; layers that are not there are read in one pass.
    """
    among = names() if among is None else among
    with unedited(editable) if editable.history.originals else nullcontext():
        dtype = averaging_dtype(editable)
        paths = {ff.layer: _path(editable, ff, dtype, among) for ff in ff_layers}
        keys_by_layer = {ff.layer: cached for ff in ff_layers if (cached := _kept(paths[ff.layer])) is not None}
        if missing := [ff for ff in ff_layers if ff.layer not in keys_by_layer]:
            texts = {name: mention_of(editable, name, i) for i, name in enumerate(among)}
            mentions = {name: text for name, text in texts.items() if text is not None}
            with computed_in(editable, dtype):
                missing_keys = [
                    keys.to("cpu", torch.bfloat16) for keys, _ in read_layers(editable, missing, [*mentions.values()])
                ]
            for ff, keys in zip(missing, missing_keys, strict=True):
                keys_by_layer[ff.layer] = NameKeys(list(mentions), keys, paths[ff.layer].stem)
                cache.write(paths[ff.layer], partial(save_state, tensors={"keys": keys}, values=list(mentions)))
    return keys_by_layer


def _path(editable: Editable, ff: FeedForward, dtype: torch.dtype, among: Sequence[str]) -> Path:
    """Return the cache path of the names' keys in a layer, read in `dtype`; in a mixture, of the experts in `ff`."""
    settings = [fingerprint(editable, ff.layer), ff.layer, str(ff.dtype), editable.chat, tuple(among), MENTIONS]
    settings += [str(memory.address) for memory in ff.memories if ff.mixture is not None]
    settings += [str(dtype)] if dtype != editable.model.dtype else []
    return cache.entry("names", repr(settings))


def mention_of(editable: Editable, name: str, number: int) -> Encoded | None:
    """Encode a mention of a name, its lead by `number`; None where the name has no token, or the text is too long."""
    try:
        text = mention(editable, name, MENTIONS[number % len(MENTIONS)])
    except FactError:
        return None
    return text if len(text.ids) <= editable.max_tokens else None


def _kept(path: Path) -> NameKeys | None:
    """Return the cached keys of a layer; None where there is no sound file."""
    try:
        tensors, name_list = load_state(path, "holds no keys of names")
        return NameKeys(name_list, tensors["keys"], path.stem)
    except (EditError, KeyError):
        return None
