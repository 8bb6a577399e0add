"""Read the keys of names in general, which C of running text hardly knows.

An update adds u · k of its δ wherever a key k is read, u = C⁻¹k* / (k*ᵀ C⁻¹ k*). Few tokens of running text end a name,
and most of these names are frequent ones, so that C spares words first, and a subject's look-alikes receive a good part
of what is written at it. The metric of an edit is that of text and of names,

    C' = C + w E[k kᵀ]   over the last tokens of some thousand names, each mentioned once

ROME and MEMIT take C from Wikipedia's text, which is full of names (arXiv 2202.05262, appendix E.2); here the names
count by a weight, whatever the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from ffedit.algebra.linalg import Moment, diagonal, double
from ffedit.editor.config import KeyConfig
from ffedit.editor.edit import unedited
from ffedit.editor.key import read_at
from ffedit.errors import EditError, FactError
from ffedit.files import cache
from ffedit.files.resuming import load_state, save_state
from ffedit.inference.names import MENTIONS, alike, mention, names
from ffedit.loading.distributed import ALONE, ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import Encoded


@dataclass(frozen=True, eq=False)
class NameMoment:
    """Second moment of a layer's keys of other names."""

    moment: Moment  # w E[k kᵀ], [Σ d_ff, Σ d_ff], float64, on the device where the layer is solved
    count: int  # of names
    left_out: tuple[str, ...]  # names that are of the facts' subjects, or that were not to count


def name_moments(
    editable: Editable,
    ff_layers: Sequence[FeedForward],
    subjects: Sequence[str],
    config: KeyConfig,
    group: ProcessGroup = ALONE,
) -> dict[int, NameMoment]:
    """Return the moments of each layer; none where names have no weight.

    Args:
        editable: the model.
        ff_layers: the layers.
        subjects: of the facts that are written: a name that is one of them, or words of one, is no other name.
        config: the weight, and what else is left out.
        group: processes that share the reading.
    """
    if not config.names_weight:
        return {}
    others, found = (*subjects, *config.without_names), {}
    theirs = {name for name in names() if any(alike(name, other) for other in others)}
    for ff in ff_layers:
        read = name_keys(editable, ff, group)
        left_out = [i for i, name in enumerate(read.names) if name in theirs]
        count = len(read.names) - len(left_out)
        blocks = []
        for total, part in zip(read.totals, double(read.keys[left_out]).split(ff.sizes, 1), strict=True):
            blocks.append(double(total).addmm(part.T, part, alpha=-1).mul_(config.names_weight / max(1, count)))
        moment = diagonal([block.to(ff.solve_device) for block in blocks])
        found[ff.layer] = NameMoment(moment, count, tuple(read.names[i] for i in left_out))
    return found


@dataclass(frozen=True, eq=False)
class NameKeys:
    """Keys of the names that ship, in one layer of the unedited model.

    They are kept in bfloat16: rounding them changes their moment by less than a name does.
    """

    names: Sequence[str]  # without those that have no token of their own
    keys: Tensor  # [names, Σ d_ff], bfloat16
    totals: Sequence[Tensor]  # Σ k kᵀ over all names, of each memory, [d_ff, d_ff], float32


def name_keys(editable: Editable, ff: FeedForward, group: ProcessGroup = ALONE) -> NameKeys:
    """Return the keys of names in a layer, read in the unedited model or kept.

    Each process of `group` reads its share, and receives all.
    """
    with unedited(editable) if editable.history.originals else nullcontext():
        about = [fingerprint(editable, ff.layer), ff.layer, str(ff.dtype), editable.chat, names(), MENTIONS]
        path = cache.path("names", sha256(repr(about).encode()).hexdigest()[:24], ".safetensors")
        found = _kept(path, len(ff.sizes))
        if not all(group.gather(found is not None)):
            mentions = {
                name: text for i, name in enumerate(names()) if (text := _mention(editable, name, i)) is not None
            }
            own = group.share(list(mentions.values()))
            rows = group.in_all(lambda: read_at(editable, ff, own)[0].to("cpu", torch.bfloat16))
            keys = torch.stack(group.exchange(list(rows)))
            parts = [part.float().to(ff.solve_device) for part in keys.split(ff.sizes, 1)]
            found = NameKeys(list(mentions), keys, [(part.T @ part).cpu() for part in parts])
            cache.write(path, partial(_keep, found))
    assert found is not None
    return found


def _keep(read: NameKeys, path: Path) -> None:
    totals = {f"total.{i}": total for i, total in enumerate(read.totals)}
    save_state(path, {"keys": read.keys, **totals}, list(read.names))


def _mention(editable: Editable, name: str, number: int) -> Encoded | None:
    """Encode the mention of the name of this number; None where it has no token, or the model takes fewer tokens."""
    try:
        text = mention(editable, name, MENTIONS[number % len(MENTIONS)])
    except FactError:
        return None
    return text if len(text.ids) <= editable.max_tokens else None


def _kept(path: Path, memories: int) -> NameKeys | None:
    """Return what `_keep` kept of a layer of so many memories; None where there is no sound file."""
    try:
        tensors, known = load_state(path, "holds no keys of names")
        return NameKeys(known, tensors["keys"], [tensors[f"total.{i}"] for i in range(memories)])
    except (EditError, KeyError):
        return None
