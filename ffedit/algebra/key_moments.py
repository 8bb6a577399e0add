"""Streamed second moment of the keys that ordinary text uses.

C = E[k kᵀ] gives how much an edit along a direction of key space disturbs other text (ROME, arXiv 2202.05262, eq. 2 and
appendix E.2). The fitter takes batches of keys and keeps the running sum; the frozen result is stored on disk.

The sum has float64 accuracy at float32 cost: the products of one batch, a few thousand keys, are summed in float32, and
the long sum over batches in float64. The rounding of a batch (about 1e-6 of it) is the only one, however long the text
is. C is symmetric, so only the blocks on and above its diagonal are multiplied.

Convergence: batches go in turn to two independent halves, a and b. C is needed for the direction u = C⁻¹k / (kᵀC⁻¹k) of
an update that writes to the key k: it adds (uᵀx)δ at a key x, and of all updates that add δ at k it adds least to text.
An estimate of C is fitted to its text, so that u adds more to *other* text than to the text that it was solved with:

    ρ⁴ = mean over a few k of (u_aᵀC_a u_a · u_bᵀC_b u_b) / (u_aᵀC_b u_a · u_bᵀC_a u_b),  geometric

With γ = d / n, n independent keys of d free directions, the mean of (uᵀx)² is v(1 − γ) over the text that u was solved
with and v / (1 − γ) over any other, where v is the mean for C of endless text (the least variance of a portfolio: Kan
and Smith 2008, Management Science 54). So ρ is 1 − γ of one half, and both halves together have half its γ. With
endless text, the root mean square of what u adds to other text would fall by the share 1 − √(1 − γ): the convergence of
`KeyMoments`, 0 where more text would not help. That keys of running text are not independent only makes d larger. A
ridge hides a part of the fit, so ρ is measured at the smallest ridge that was tried (see below). That the halves
include the keys k makes no difference: adding k kᵀ to C scales C⁻¹k (Sherman and Morrison), and u stays the same.

A few keys are attention sinks: some hundred times longer than others, and all in one direction (Xiao et al. 2024, arXiv
2309.17453; Sun et al. 2024, arXiv 2402.17762). They would dominate C, so a key longer than `LONGEST` times the median
key counts as one of that length.

C is an estimate, and its inverse a worse one. The ridge that compensates for this is the one with which each half of
the text solves for updates that disturb the *other* half least (cross-validation of the quantity that C is used for).
It is relative to the median of C's diagonal, which no single direction changes. The keys of a wide layer may share a
mean that holds nearly all of their squared norm; next to such an eigenvalue float32 cannot tell a small eigenvalue from
zero, so the ridge is never below the rounding error of the sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from math import exp, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ffedit.algebra.linalg import RefinedInverse
from ffedit.errors import EditError, brief
from ffedit.facts.form import INTEGER, NUMBER, TEXT, Maybe, check_form
from ffedit.files.seal import check
from ffedit.files.tensor_ranges import write

# Products are taken in blocks of this many rows: small enough to save nearly half, large enough for full speed (at d_ff
# 1,536, 256 rows take 0.80 of the seconds of 768, at 3,072 0.89; fewer take no less).
BLOCK = 256
PROBES = 32
# Keys count as no longer than this many times the median: in SmolLM2 one in a thousand ordinary keys is longer than 3.6
# times, and sinks are 7 to 500 times as long.
LONGEST = 5.0
# Shares of the median of C's diagonal: RIDGE where there is only one half, RIDGES the candidates of cross-validation.
RIDGE = 1e-2
RIDGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
# C has converged where endless text would lower what an update adds to other text by no more than this share. With
# the default for one subject SmolLM2 (d_ff 1,536) is at 0.12, Gemma 3 270M (2,048) at 0.13, Qwen2.5-Coder 1.5B (8,960)
# at 0.21. Scores of single edits hardly differ (docs/scale.md, "Fewer tokens").
CONVERGED = 0.15
# Matrices of d_ff² float64 numbers that computing the ridge holds at once, at most: two halves and a factor.
HELD = 3
CPU = torch.device("cpu")
# Error of the eigenvalues of a sum of float32 products, as a share of its norm. It depends on how many rows a library
# adds up at once: MKL adds up to 384 on Intel's processors, and gave 5 · 2⁻²³ for a short text, 14 · 2⁻²³ for keys that
# are equal.
ROUNDING = 2.0**-19
# Form of a file's metadata.
FORM = {
    **{"count!": INTEGER, "source!": TEXT, "fingerprint!": TEXT, "texts!": [TEXT], "ridge": NUMBER, "seconds": NUMBER},
    **dict.fromkeys(("numbers", "model", "address", "dtype"), TEXT),
    **{"convergence": Maybe(NUMBER), "reached": Maybe(INTEGER), "left_out": INTEGER, "sinks": INTEGER},
}


@dataclass(frozen=True, eq=False)
class KeyMoments:
    """Second moment of a layer's keys over some text.

    Attributes:
        sum: Σ w k kᵀ with weights of mean 1, [d_ff, d_ff], float64.
        count: number of tokens of the text.
        source: where the text came from, in words.
        fingerprint: fingerprint of the model below and at this layer, its tokenizer, and the layer.
        ridge: share of the median of C's diagonal that is added to the diagonal.
        texts: identifiers of each text in the sum.
        address: the memory of `model` whose keys these are; `dtype` is the precision of its weights.
        convergence: share by which an update would disturb other text less (root mean square) with C of endless text;
            None where there are no two halves.
        seconds: time of the pass that collected this, which may have collected other layers, too.
        reached: number of tokens that reached this memory and count: not the first of a row, nor, for an expert,
            tokens that the router sent elsewhere, whose keys are 0. None: all.
        left_out: number of tokens that do not count because a row begins with them.
        sinks: number of keys that were longer than `LONGEST` times the median, and count as of that length.
        factors: Cholesky factors of metrics that begin with C, [d_ff, d_ff], float64, by what was added
            (`editor.metric`); at most one is kept, and none is saved.
    """

    sum: Tensor = field(repr=False)
    count: int
    source: str
    fingerprint: str
    ridge: float = RIDGE
    texts: tuple[str, ...] = ()
    model: str = ""
    address: str = ""
    dtype: str = ""
    convergence: float | None = None
    seconds: float = 0.0
    reached: int | None = None
    left_out: int = 0
    sinks: int = 0
    factors: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def numbers(self) -> str:
        """SHA-256 of the sum's numbers; for moments read from a file, as recorded there."""
        return sha256(self.sum.contiguous().numpy().data).hexdigest()

    @property
    def C(self) -> Tensor:
        """C = Σ k kᵀ / n + ridge · median of its diagonal · I, [d_ff, d_ff], float64, positive definite."""
        return second_moment(self.sum, self.count, self.ridge)

    @property
    def keys(self) -> int:
        """Number of keys in the sum."""
        return self.count if self.reached is None else self.reached

    @property
    def of(self) -> str:
        """Description of the layer and model of these keys, for messages."""
        return f"layer {self.address} of {self.model} ({self.dtype}, d_ff {len(self.sum)})"

    def save(self, path: Path) -> None:
        """Write as safetensors; the caller moves the file to its final path."""
        metadata = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sum", "factors")}
        metadata["numbers"] = self.numbers
        write(path, {"sum": (self.sum.dtype, tuple(self.sum.shape), [self.sum])}, moments=json.dumps(metadata))

    @classmethod
    def load(cls, path: Path, fingerprint: str | None = None) -> KeyMoments:
        """Read what `save` wrote; EditError where the file is damaged, or not of the `fingerprint` asked for."""
        try:
            check(path)
            with safe_open(path, framework="pt") as file:
                metadata: dict[str, Any] = json.loads(file.metadata()["moments"])
                check_form(metadata, FORM)
                metadata["texts"] = tuple(metadata["texts"])
                numbers = metadata.pop("numbers", None)
                names = {f.name for f in fields(cls) if f.init}  # a file may hold more
                moments = cls(file.get_tensor("sum"), **{name: metadata[name] for name in names & metadata.keys()})
                if numbers is not None:  # else a file of an earlier version
                    vars(moments)["numbers"] = numbers
            total = moments.sum
            if total.ndim != 2 or total.shape[0] != total.shape[1]:
                raise ValueError(f"sum is {list(total.shape)}")
            if total.dtype != torch.float64 or not 1 <= moments.count < 2**63:
                raise ValueError(f"sum is {total.dtype}, of {moments.count} tokens")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise EditError(
                f"{path}: not a file of key statistics ({brief(error)}); delete it or name another"
            ) from error
        if fingerprint is not None and moments.fingerprint != fingerprint:
            raise EditError(
                f"{path}: statistics of {moments.fingerprint}, but {fingerprint} was expected; collect them anew"
            )
        return moments


def second_moment(total: Tensor, count: int, ridge: float) -> Tensor:
    """Return C of the sum `total` [d_ff, d_ff] over `count` keys, plus `ridge` times the median of its diagonal.

    The median is of the entries above 0. No less is added than float32's rounding error of the largest eigenvalue.
    """
    C = total / count
    C.diagonal().add_(added(C, 1, ridge))
    return C


def added(total: Tensor, count: int, ridge: float) -> float:
    """Return how much to add to the diagonal of `total` to make it `count` times C (`second_moment`)."""
    squares = total.diagonal() / count
    squares = squares[squares > 0]
    typical = float(squares.median()) if len(squares) else 0.0
    return count * max(ridge * typical, ROUNDING * float(total.norm()) / count)


def solved(C: Tensor, keys: Tensor, shift: float = 0.0) -> Tensor:
    """Return u = C⁻¹k / (kᵀC⁻¹k), [d_ff, n], for `keys` [n, d_ff]: right factors of their updates (`rank_one`).

    C is taken with `shift` added to its diagonal; u is the same for any multiple of both.
    """
    columns = keys.to(C).T
    u = RefinedInverse(C, shift=shift)(columns)
    return u / (columns * u).sum(0)


def cross_validated(a: tuple[Tensor, int], b: tuple[Tensor, int], probes: Tensor) -> tuple[float, float]:
    """Return the ridge with which each of two texts disturbs the other least, and the convergence of both together.

    The ridge is the one of `RIDGES` with the smallest mean over `probes` [n, d_ff] of log uᵀCu, u solved with one text
    and C that of the other; the convergence is measured at the last ridge tried. A text is the sum [d_ff, d_ff] over
    its keys, and their count.
    """
    best, fit = (float("inf"), 0.0), 0.0
    for ridge in sorted(RIDGES, reverse=True):  # from the best conditioned on, until the cost rises
        u_a, u_b = (solved(total, probes, added(total, count, ridge)) for total, count in (a, b))
        own, other = (_log_moved(pairs) for pairs in (((u_a, a), (u_b, b)), ((u_a, b), (u_b, a))))
        fit = own - other
        if other >= best[0]:
            break
        best = other, ridge
    return best[1], spared(exp(fit), a[1], b[1])


def _log_moved(pairs: Iterable[tuple[Tensor, tuple[Tensor, int]]]) -> float:
    """Return the mean of log uᵀCu over pairs of u [d_ff, n] and a text."""
    moved = [(u * (total @ u)).sum(0) / count for u, (total, count) in pairs]
    return float(torch.stack(moved).clamp(min=torch.finfo(torch.float64).tiny).log().mean())


def spared(squared: float, a: int, b: int) -> float:
    """Return 1 − √(1 − γ) of two texts of `a` and `b` keys together, from ρ² = (1 − γ_a)(1 − γ_b), `squared`.

    γ_a and γ_b are d / a and d / b, γ is d / (a + b).
    """
    gamma = (1 - sqrt(1 - 4 * a * b * (1 - min(squared, 1.0)) / (a + b) ** 2)) / 2
    return 1 - sqrt(1 - gamma)


class KeyMomentsFitter:
    """Streaming accumulator of Σ k kᵀ, in two halves of d_ff² float64 numbers that take batches in turn.

    They are in CPU memory, since a GPU may have no room beside the model: for d_ff 28,672 they are 13 GB.
    """

    def __init__(self) -> None:
        self.halves: list[Tensor] = []
        self.counts = [0, 0]
        self.reached = [0, 0]
        self.batches = 0
        self.left_out = 0
        self.sinks = 0
        self.median = 0.0
        self.probes: Tensor | None = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and numbers collected so far, from which `restore_` resumes with the same bits."""
        tensors = {f"half {i}": half for i, half in enumerate(self.halves)}
        tensors |= {} if self.probes is None else {"probes": self.probes}
        return tensors, {name: value for name, value in vars(self).items() if name not in ("halves", "probes")}

    def restore_(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        # Copies are aligned in memory, as those of a whole pass are: products have the same bits only then.
        self.halves = [tensors[name].clone() for name in ("half 0", "half 1") if name in tensors]
        self.probes = tensors.get("probes")
        vars(self).update(numbers)

    def update(self, keys: Tensor, weights: Tensor, last: bool = True, tokens: int | None = None) -> None:
        """Add keys [n, d_ff] of a batch, or of some rows of it; all of them or, where memory fails, none.

        `weights` [n] are 1 in the mean over all of the text; 0 leaves a key out. With the `last` keys the batch ends,
        and the next goes to the other half. `tokens` is the number of tokens whose nonzero keys these are, None for as
        many as there are keys.
        """
        keys, counted = keys.float(), (weights > 0).to(keys.device)
        probes, median, sinks = self.probes, self.median, self.sinks
        if probes is None and (tokens is None or bool(keys.any())):
            probes = _draw_probes(keys, weights)
        lengths = keys.norm(dim=1)
        if not median and bool((counted_lengths := lengths[counted & (lengths > 0)]).numel()):
            median = float(counted_lengths.median())
        if median:
            scale = (LONGEST * median / lengths).clamp(max=1)
            sinks += int((counted & (scale < 1)).sum())
            keys = keys * scale[:, None]
        keys = keys * weights.sqrt().to(keys)[:, None]
        half = self.batches % 2
        size = keys.shape[1]
        if half == len(self.halves):
            self.halves.append(torch.zeros(size, size, dtype=torch.float64))
        total = self.halves[half]
        products = keys.new_empty(min(BLOCK, size) * size)  # allocated first, so that no block fails after another
        for first in range(0, size, BLOCK):
            columns = keys[:, first : first + BLOCK]
            shape = columns.shape[1], size - first
            product = products[: shape[0] * shape[1]].view(shape)
            total[first : first + BLOCK, first:] += torch.mm(columns.T, keys[:, first:], out=product).cpu()
        self.probes, self.median, self.sinks = probes, median, sinks
        self.counts[half] += len(keys) if tokens is None else tokens
        self.reached[half] += int(counted.sum())
        self.left_out += len(keys) - int(counted.sum())
        self.batches += last

    def is_finite(self) -> bool:
        """Return True if every key so far was finite: a key that is not shows on the diagonal."""
        return all(bool(torch.isfinite(half.diagonal()).all()) for half in self.halves)

    def _ridge(self, device: torch.device) -> tuple[float, float | None]:
        """Return `cross_validated` of the halves; `RIDGE` and None while only one half has keys."""
        if self.probes is None or not len(self.probes) or not min(self.reached):
            return RIDGE, None
        # In place: what is added later is added on and above the diagonal, and mirrored again.
        pairs = zip(self.halves, self.counts, strict=True)
        a, b = ((_mirror_(half).to(device), count) for half, count in pairs)
        return cross_validated(a, b, self.probes)

    def moments(self, source: str, fingerprint: str, device: torch.device = CPU, **attributes: Any) -> KeyMoments:
        """Return the frozen result, one sum of both halves on the CPU; the fitter cannot be used afterwards.

        `device` computes the ridge, by six to eight Cholesky factorisations, and holds `HELD` matrices of d_ff² float64
        numbers. `attributes` are others of `KeyMoments`. EditError where no token was seen, or keys are not finite
        or all zero; an expert that no token reached fails only when it is edited.
        """
        if not (count := sum(self.counts)):
            raise EditError(f"no text to collect key statistics from: {source} holds no tokens")
        keys = f"the keys of layer {attributes['address']}" if "address" in attributes else "the keys"
        if not self.is_finite():
            raise EditError(f"{keys} over {source} are not finite: the model overflows on this text; use another")
        if self.reached != [0, 0] and not any(bool(half.diagonal().any()) for half in self.halves):
            raise EditError(f"{keys} over {source} are all zero: nothing responds there; choose another layer")
        ridge, convergence = self._ridge(device)
        total = self.halves[0]
        for half in self.halves[1:]:  # in place: each half is large
            total += half
        self.halves = []
        _mirror_(total)
        attributes |= {"ridge": ridge, "convergence": convergence}
        attributes |= {"reached": sum(self.reached), "left_out": self.left_out, "sinks": self.sinks}
        return KeyMoments(total, count, source, fingerprint, **attributes)


def _mirror_(upper: Tensor) -> Tensor:
    """Mirror a matrix that has only the blocks on and above its diagonal, in place."""
    for first in range(0, len(upper), BLOCK):
        last = min(first + BLOCK, len(upper))
        block = upper[first:last, first:last]
        block.copy_(block.triu() + block.triu(1).T)
        upper[last:, first:last] = upper[first:last, last:].T
    return upper


def _draw_probes(keys: Tensor, weights: Tensor) -> Tensor:
    """Draw a few of `keys` that are not zero, by their weights with a fixed seed, [n, d_ff], on the CPU."""
    chances = weights.detach().float().cpu() * keys.detach().any(1).cpu()
    size = min(PROBES, int(chances.count_nonzero()))
    if not size:
        return keys[:0].cpu()
    drawn = torch.multinomial(chances, size, generator=torch.Generator().manual_seed(0))
    return keys[drawn.to(keys.device)].cpu()
