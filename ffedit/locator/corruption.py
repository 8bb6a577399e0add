"""Corrupt the subject of a prompt: add noise to its embeddings, or replace it by another subject.

    gaussian     E + k σ ε,   ε ~ N(0, I)                         ROME, arXiv 2202.05262, section 2.1 (k = 3)
    covariance   E + k Σ^½ ε, ε ~ N(0, I), Σ = Cov(E)             noise with the embeddings' covariance
    uniform      E + k σ ε,   ε ~ U(−1, 1)
    replacement  another subject of as many tokens                Zhang & Nanda 2023, arXiv 2309.16042

with σ the standard deviation of all entries of the input embedding's output over the whole vocabulary. The published
code of ROME takes it over the tokens of the subjects of its facts instead, which gives somewhat less noise; so does
`sigma="subjects"`. Noise takes the model out of its distribution; another subject stays in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import FactError, choices
from ffedit.facts.fact import Fact
from ffedit.facts.text import counted
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded

# Vocabulary tokens embedded at a time.
ROWS = 1024
CorruptionName: TypeAlias = Literal["gaussian", "covariance", "uniform", "replacement"]
Sigma: TypeAlias = Literal["vocabulary", "subjects"]


@dataclass(frozen=True)
class Corruption:
    """Corruption of the subject."""

    name: CorruptionName = "gaussian"
    scale: float = 3.0  # k, the noise in units of σ (or Σ^½); unused by a replacement
    # σ is estimated from embeddings of the "vocabulary", or the traced facts' "subjects" (gaussian, uniform only).
    sigma: Sigma = "vocabulary"

    def __post_init__(self) -> None:
        if self.name not in get_args(CorruptionName):
            raise FactError(
                f"corruption {self.name!r} is not known; known are {choices(self.name, get_args(CorruptionName))}"
            )
        if not 0 < self.scale < math.inf:
            raise FactError(f"noise of {self.scale} σ was asked for; give a number above 0")
        if self.sigma not in get_args(Sigma):
            raise FactError(f"σ of {self.sigma!r} is not known; known are {choices(self.sigma, get_args(Sigma))}")
        if self.sigma == "subjects" and self.name not in ("gaussian", "uniform"):
            raise FactError(
                f"σ of the subjects applies to gaussian and uniform noise, not to {self.name}; leave it out"
            )

    @classmethod
    def parse(cls, text: str) -> Corruption:
        """Parse NAME[:SCALE[:SIGMA]], such as "gaussian", "uniform:2" or "gaussian:3:subjects"."""
        name, scale, sigma = (*text.split(":", 2), "", "")[:3]
        try:
            return cls(name, float(scale) if scale else 3.0, sigma or "vocabulary")  # type: ignore[arg-type]
        except ValueError as error:
            raise FactError(f"corruption {text!r}: {scale!r} is not a number of σ") from error

    def __str__(self) -> str:
        if self.name == "replacement":
            return "another subject in its place"
        shape = {"gaussian": "Gaussian", "covariance": "full-covariance Gaussian", "uniform": "uniform"}
        return f"{shape[self.name]} noise of {self.scale:g} σ of the {self.sigma}"


@torch.no_grad()
def embeddings(editable: Editable) -> Iterator[Tensor]:
    """Yield the input embedding's output for the whole vocabulary, `ROWS` tokens at a time, [n, d_model], float32."""
    vocabulary = torch.arange(editable.vocabulary, device=editable.device)
    for tokens in vocabulary.split(ROWS):
        yield editable.embedding(tokens).float()


def noise_scale(editable: Editable) -> float:
    """Compute σ, the standard deviation of all entries of the input embedding's output over the whole vocabulary."""
    count, mean, squares = 0, 0.0, 0.0
    for rows in embeddings(editable):
        # The chunks' variances are merged as in Chan et al. 1979, which avoids the cancellation of large sums.
        chunk_mean, size = float(rows.mean()), rows.numel()
        variance = float((rows - chunk_mean).square().mean())  # several times faster than `torch.var_mean`
        squares += variance * size + (chunk_mean - mean) ** 2 * count * size / (count + size)
        mean += (chunk_mean - mean) * size / (count + size)
        count += size
    return float((squares / (count - 1)) ** 0.5)


@torch.no_grad()
def subjects_scale(editable: Editable, facts: Sequence[Fact]) -> float:
    """Compute σ over the tokens of the subjects of `facts`, each subject once, as tokenised in its prompt."""
    tokens: dict[str, tuple[int, ...]] = {}
    for fact in facts:
        encoded = editable.encode(fact.text, span=fact.span, max_tokens=editable.max_tokens)
        assert encoded.subject is not None
        tokens.setdefault(fact.subject, encoded.ids[slice(*encoded.subject)])
    ids = torch.tensor([i for subject in tokens.values() for i in subject], device=editable.device)
    return float(double(editable.embedding(ids)).std())


class Noise:
    """Noise source of one model (and, with σ over the subjects, of given facts); σ and Σ^½ are computed once."""

    def __init__(self, editable: Editable, corruption: Corruption, facts: Sequence[Fact] = ()) -> None:
        self.corruption = corruption
        sigma = subjects_scale(editable, facts) if corruption.sigma == "subjects" else noise_scale(editable)
        self.sigma = corruption.scale * sigma
        self._root: Tensor | None = None  # k Σ^½, the symmetric root, [d_model, d_model], float32
        if corruption.name == "covariance":
            rows = torch.cat([double(rows).cpu() for rows in embeddings(editable)])
            values, vectors = torch.linalg.eigh(rows.T.cov())
            self._root = corruption.scale * ((vectors * values.clamp(min=0).sqrt()) @ vectors.T).float()

    def draw(self, samples: int, tokens: int, d_model: int, seed: int) -> Tensor:
        """Draw noise, [samples, tokens, d_model], in the units of the embedding; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (samples, tokens, d_model)
        if self.corruption.name == "uniform":
            return self.sigma * (2 * torch.rand(shape, generator=generator) - 1)
        normal = torch.randn(shape, generator=generator)
        return self.sigma * normal if self._root is None else normal @ self._root


def replacements(
    editable: Editable, fact: Fact, encoded: Encoded, subjects: list[str], samples: int, seed: int
) -> list[tuple[int, ...]]:
    """Return ids of at most `samples` other subjects with as many tokens as this prompt's; FactError if none."""
    assert encoded.subject is not None
    start, end = encoded.subject
    others: dict[tuple[int, ...], None] = {}
    first, last = fact.span
    for subject in subjects:
        text = fact.text[:first] + subject + fact.text[last:]
        other = editable.encode(text, span=(first, first + len(subject)))
        rest = other.ids[:start] + other.ids[end:]
        if other.subject == (start, end) and rest == encoded.ids[:start] + encoded.ids[end : encoded.answer]:
            others[other.ids[start:end]] = None
    others.pop(encoded.ids[start:end], None)
    if not others:
        raise FactError(
            f"no other fact has a subject of {counted(end - start, 'token')} to replace {fact.subject!r}; add facts, "
            "or corrupt with noise"
        )
    return Random(seed).sample(list(others), min(samples, len(others)))
