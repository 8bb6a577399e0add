"""Which keys does ordinary text use? Their second moment, streamed.

C = E[k kᵀ] says how much an edit along a direction of key space disturbs other text (ROME, arXiv 2202.05262, eq. 2
and appendix E.2). The fitter takes batches of keys and keeps the running sum; the frozen result is what the algebra
reads and what is kept on disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ffedit.errors import EditError


@dataclass(frozen=True, eq=False)
class KeyMoments:
    """The second moment of a layer's keys over some text.

    Attributes:
        sum: Σ w k kᵀ with weights of mean 1, [d_ff, d_ff], float64.
        count: number of keys (tokens) in the sum.
        source: where the text came from, in words.
        fingerprint: of the model below and at this layer, the tokenizer and the text.
        ridge: share of the mean eigenvalue that is added to the diagonal of C.
    """

    sum: Tensor = field(repr=False)
    count: int
    source: str
    fingerprint: str
    ridge: float = 1e-4

    @property
    def C(self) -> Tensor:
        """C = Σ k kᵀ / n + ridge · mean eigenvalue · I, [d_ff, d_ff], float64, positive definite.

        The ridge says that a direction which the sampled text never used is still not free; without it C is
        singular as long as there are fewer tokens than d_ff.
        """
        C = self.sum / self.count
        return C + self.ridge * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype, device=C.device)

    def save(self, path: Path) -> None:
        """Write as safetensors; the caller moves the file into place."""
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sum"}
        save_file({"sum": self.sum.cpu().contiguous()}, path, metadata={"moments": json.dumps(about)})

    @classmethod
    def load(cls, path: Path, fingerprint: str | None = None) -> KeyMoments:
        """Read what `save` wrote; with `fingerprint`, refuse statistics of anything else.

        Raises:
            EditError: the file is damaged, foreign, or of another model, layer or text.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["moments"])
                moments = cls(file.get_tensor("sum"), **about)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise EditError(f"{path}: not a file of key statistics ({error}); delete it or name another") from error
        if fingerprint is not None and moments.fingerprint != fingerprint:
            raise EditError(
                f"{path}: statistics of {moments.fingerprint}, but {fingerprint} was expected; collect them anew"
            )
        return moments


class MomentsFitter:
    """Streams keys into Σ k kᵀ: products in float32 per batch, the sum over batches in float64."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self.count = 0

    def update(self, keys: Tensor, weights: Tensor | None = None) -> None:
        """Add keys [n, d_ff]; `weights` [n] say how much each counts, 1 in the mean over all of the text."""
        keys = keys.float()
        if weights is not None:
            keys = keys * weights.sqrt().to(keys)[:, None]
        product = keys.T @ keys
        # Few thousand products are summed in float32 (relative error about 1e-6); the long sum is in float64.
        product = product.cpu().double() if product.device.type == "mps" else product.double()
        self._sum = product if self._sum is None else self._sum + product
        self.count += len(keys)

    def moments(self, source: str, fingerprint: str) -> KeyMoments:
        """The frozen result.

        Raises:
            EditError: no key was seen.
        """
        if self._sum is None or not self.count:
            raise EditError(f"no text to collect key statistics from: {source} holds no tokens")
        if not torch.isfinite(self._sum).all():
            raise EditError(f"the keys over {source} are not finite: the model overflows on this text")
        return KeyMoments(self._sum, self.count, source, fingerprint)
