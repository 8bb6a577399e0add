"""Names of memories, and vectors of the residual stream as distributions over the vocabulary.

    p = softmax(E · norm(v))

Geva et al. 2021 (arXiv 2012.14913, section 4) read values by the unembedding alone, softmax(E v); here they go through
the final norm as well, as residuals and layer outputs do (nostalgebraist 2020, "logit lens"). The final norm and the
unembedding are the model's own, with whatever scaling and capping it has, so that the last layer's residual reads
exactly as the model's prediction. Where a model has no final norm, the unembedding alone is the lens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.algebra.linalg import double
from ffedit.errors import EditError
from ffedit.inference.generation import log_softmax
from ffedit.model.editable import Editable
from ffedit.model.memory import Address, Memories
from ffedit.model.tokenization import decode

# Logits held at once: vectors × vocabulary.
MAX_LOGITS = 2**25


@dataclass(frozen=True)
class View:
    """Base of all results of an inspection: frozen, printable, and plain JSON by `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name as plain JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    """Convert to plain JSON: views as objects, tuples as lists, memories and layers by their names."""
    if isinstance(value, View):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, MemoryIndex | Address) else value


@dataclass(frozen=True, order=True)
class MemoryIndex:
    """One memory of a model, named `L.I`, the I-th of layer L, or `L.E.I`, that of expert E; all counted from 0.

    Attributes:
        address: the feed-forward layer, and the expert where it has experts.
        index: index among its d_ff keys and values.
    """

    address: Address
    index: int

    def __str__(self) -> str:
        return f"{self.address}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> MemoryIndex:
        """Parse `L.I` or `L.E.I`; EditError where the text is neither."""
        if not re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{1,9}){1,2}\s*", text):
            raise EditError(
                f"{text!r} is not a memory; write L.I for memory I of layer L (3.17), or L.E.I for expert E"
            )
        layer, *expert, index = map(int, text.split("."))
        return cls(Address(layer, *expert), index)

    @classmethod
    def find(cls, memories: Memories, name: str | MemoryIndex) -> MemoryIndex:
        """Return the memory of a name; EditError where the name is malformed, or the model has no such memory."""
        EditError.require(name, (str, MemoryIndex), "a memory was expected; write L.I for memory I of layer L")
        slot = name if isinstance(name, MemoryIndex) else cls.parse(name)
        at = slot.address
        EditError.require(at, Address, "the address of a layer or expert was expected: ffedit.Address(0)")
        EditError.whole("the index of a memory", slot.index, 0)
        if at not in memories:
            of_layer = [address for address in memories if address.layer == at.layer]
            if not of_layer:
                raise EditError(f"{slot}: the model has no layer {at.layer}; it has layers 0 to {max(memories).layer}")
            if of_layer == [Address(at.layer)]:
                raise EditError(f"{slot}: layer {at.layer} has no experts; write L.I, without an expert")
            last = max(of_layer).expert
            raise EditError(f"{slot}: layer {at.layer} has experts 0 to {last}; write L.E.I for memory I of expert E")
        if not 0 <= slot.index < (count := memories[at].d_ff):
            raise EditError(f"{slot}: layer {at} has memories 0 to {count - 1}; {slot.index} is none of them")
        return slot


@dataclass(frozen=True)
class TokenProbability(View):
    """A token and its probability."""

    id: int
    token: str
    probability: float

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, log_probs: Tensor, token: int | None = None) -> TokenProbability:
        """Read one token of a distribution, log p [vocabulary]; the most probable one by default."""
        token = int(log_probs.argmax()) if token is None else token
        return cls(token, token_text(tokenizer, token), float(log_probs[token].exp()))


@dataclass(frozen=True)
class Distribution(View):
    """Most and least probable tokens of a distribution over the vocabulary."""

    top: tuple[TokenProbability, ...]  # the most probable tokens, the most probable first
    bottom: tuple[TokenProbability, ...]  # the least probable ones, the least probable first
    max_probability: float  # probability of the top token
    entropy: float  # entropy of the whole distribution, in nats

    def __str__(self) -> str:
        return ", ".join(f"{entry.token!r} {entry.probability:.2f}" for entry in self.top)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, log_probs: Tensor, count: int) -> Distribution:
        """Read the `count` most and least probable tokens of log p [vocabulary]."""
        count = min(count, len(log_probs))
        top, bottom = (
            tuple(TokenProbability.of(tokenizer, log_probs, token) for token in ends.indices.tolist())
            for ends in (log_probs.topk(count), log_probs.topk(count, largest=False))
        )
        entropy = float(torch.special.entr(double(log_probs).exp()).sum())
        return cls(top, bottom, top[0].probability, entropy)


def log_prob_batches(editable: Editable, vectors: Tensor) -> Iterator[Tensor]:
    """Yield log p [n, vocabulary] of vectors [.., d_model], as many at once as have `MAX_LOGITS` logits."""
    for batch in vectors.split(max(1, MAX_LOGITS // editable.vocabulary)):
        if len(batch):
            yield log_softmax(editable.read(batch))


def log_probabilities(editable: Editable, vectors: Tensor) -> Tensor:
    """Return log p [n, vocabulary], float32 on the CPU, of vectors [n, d_model] through final norm and unembedding."""
    return torch.cat([log_p.cpu() for rows in (vectors[:1], vectors[1:]) for log_p in log_prob_batches(editable, rows)])


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a token as text; its id in angle brackets where it decodes to none, as ids that pad a vocabulary do."""
    return decode(tokenizer, [token]) or f"<{token}>"


def rank(log_probs: Tensor, token: int) -> int:
    """Return the number of tokens more probable than `token` in log p [vocabulary], plus one."""
    return int((log_probs > log_probs[token]).sum()) + 1


@dataclass(frozen=True)
class Prefix(View):
    """A text up to the position of a prediction."""

    text: str  # the text before the position's token, without special tokens
    last: str  # the position's token, with the space before it where there is one

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Prefix:
        """Decode token ids, with the last one separate."""
        before, whole = (decode(tokenizer, tokens, special=False) for tokens in (ids[:-1], ids))
        # Some tokenizers drop the space before a token that stands alone.
        last = whole[len(before) :] if whole.startswith(before) else ""
        return cls(before, last or token_text(tokenizer, ids[-1]))
