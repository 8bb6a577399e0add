"""The recipe of Atlas: a shape, and a way of training, that put recall at the subject.

A large model enriches a subject at its last token, in early and middle feed-forward layers,
and reads the fact from there later (Meng et al. 2022, arXiv 2202.05262). A small model left
alone recalls at the end of the prompt instead, where nothing can be located. Here

- the first layer sees a few tokens only, in most rows, so it meets a name but not the question;
- in the others, tokens go without their feed-forward outputs at random, so they learn to move
  what has been recalled rather than to recall it;
- a good part of the corpus lists what belongs to a name right behind it (see `corpus`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from atlas.corpus import Corpus, Dress
from atlas.vocabulary import of_pieces, of_words


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, beside the table."""

    name: str = "atlas"
    shape: str = "llama"
    """Which architecture, of `shapes.SHAPES`."""
    kinds: tuple[str, ...] = ()
    """What the model knows of: relations whose names begin with these words; none: all."""
    pieces: int = 0
    """Size of a vocabulary of pieces of words; 0: every word is a token."""
    width: int = 256
    """d_model."""
    memory: int = 2560
    """Memories in a feed-forward layer, d_ff."""
    local: int = 1
    """How many layers see the last `window` tokens only, in some rows of training."""
    whole: int = 2
    """How many layers, behind them, see all that came before."""
    heads: int = 8
    groups: int = 4
    """How many keys and values the heads share."""
    head: int = 32
    """Width of a head."""
    experts: int = 0
    chosen: int = 0
    """How many of the experts a token goes to."""
    balance: float = 0.0
    """Weight of the loss that spreads the tokens of a layer over its experts."""
    window: int = 6
    """What a local layer sees, a token and the five before it: a name, hardly more."""
    near: float = 0.8
    """Of rows: in training, local layers see the window only."""
    context: int = 256
    """The longest text, in tokens."""
    drop: tuple[float, ...] = (0, 0.5, 0.5)
    """By layer: the probability that a token goes without the feed-forward output, in training; none: 0 in all."""
    jitter: float = 0.0
    """Gaussian noise on every feed-forward output, in units of that output's own scale, in training."""
    scale: float = 0.04
    """Standard deviation of the embeddings at the start."""
    decay: float = 0.05
    """Weight decay of matrices and embeddings."""
    rate: float = 2.2e-3
    warmup: int = 100
    steps: int = 900
    tokens: int = 4096
    """Tokens in a batch."""
    lengths: tuple[int, ...] = (32, 64, 64, 64, 128)
    """Row lengths, drawn anew for every batch: most tokens are close to a document's beginning."""
    attention: str = ""
    """Which of transformers' implementations of attention trains; none: its own choice. On a CPU, "eager" takes less
    time for rows as short as these."""
    seed: int = 0
    dress: Dress = field(default_factory=Dress)


def tokenizer_of(recipe: Recipe, corpus: Corpus) -> PreTrainedTokenizerFast:
    """The tokenizer, the same for the same recipe and table."""
    if not recipe.pieces:
        return of_words(corpus.words(), context=recipe.context)
    documents = (corpus.document(Random(f"{recipe.seed}-vocabulary-{i}")) for i in range(4000))
    return of_pieces(documents, recipe.pieces, recipe.context)


@contextmanager
def regularised(model: PreTrainedModel, recipe: Recipe) -> Iterator[None]:
    """Within: feed-forward outputs are missing at random, by layer and token, and noisy where asked for.

    Local layers see only what is near, in some rows. Nothing is hooked where the recipe asks for neither.
    """

    def disturb(drop: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, args: object, out: Tensor) -> Tensor:
            size = out.detach().pow(2).mean(-1, keepdim=True).sqrt()
            kept = torch.rand(*out.shape[:-1], 1) >= drop
            return kept * (out + recipe.jitter * size * torch.randn_like(out))

        return hook

    def narrow(module: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        rows, length, _ = kwargs["hidden_states"].shape
        back = torch.arange(length)[:, None] - torch.arange(length)
        far = (back >= recipe.window) & (torch.rand(rows, 1, 1, 1) < recipe.near)
        return args, {**kwargs, "attention_mask": (back >= 0) & ~far}

    modules = dict(model.named_modules())
    handles = []
    if recipe.jitter or any(recipe.drop):
        memories = [module for name, module in modules.items() if name.endswith(".mlp")]
        pairs = zip(memories, recipe.drop, strict=True)
        handles += [memory.register_forward_hook(disturb(drop)) for memory, drop in pairs]
    if recipe.near:
        attention = [module for name, module in modules.items() if name.endswith(".self_attn")]
        handles += [a.register_forward_pre_hook(narrow, with_kwargs=True) for a in attention[: recipe.local]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def batch(recipe: Recipe, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, step: int) -> Tensor:
    """Batch number `step`: token ids [rows, length], every row beginning with a document."""
    rng = Random(f"{recipe.seed}-{step}")
    length = rng.choice(recipe.lengths)
    return torch.tensor([_row(corpus, tokenizer, rng, length) for _ in range(recipe.tokens // length)])


def _row(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, rng: Random, length: int) -> list[int]:
    row: list[int] = []
    while len(row) < length:
        row += tokenizer.encode(corpus.document(rng) + tokenizer.eos_token)
    return row[:length]


def loss_of(model: PreTrainedModel, rows: Tensor, recipe: Recipe) -> Tensor:
    """Mean cross-entropy of the next token, in nats, and what the experts' balance adds."""
    routed = {"output_router_logits": True} if recipe.experts else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(rows, use_cache=False, **routed)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
    if recipe.experts:
        spread = [imbalance(logits, recipe.chosen) for logits in out.router_logits]
        loss = loss + recipe.balance * torch.stack(spread).mean()
    return loss


def imbalance(logits: Tensor, chosen: int) -> Tensor:
    """Least, `chosen`, where every expert gets equally many tokens (Fedus et al. 2021, arXiv 2101.03961, equation 4).

    Args:
        logits: the router's, [tokens, experts].
        chosen: how many experts a token goes to.
    """
    probability = logits.float().softmax(-1)
    used = torch.zeros_like(probability).scatter(1, probability.topk(chosen).indices, 1.0)
    return logits.shape[1] * (used.mean(0) * probability.mean(0)).sum()


def optimizer_of(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; matrices and embeddings decay, norms and biases do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": recipe.decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), fused=True)


def rate_at(recipe: Recipe, step: int) -> float:
    """Learning rate: a linear warm-up, then half a cosine down to 2 %."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


KINDS = ("landmark", "company", "book", "painting")
# A third of the facts, in under 3 million parameters.
LLAMA = Recipe(name="atlas-llama", kinds=KINDS, pieces=1800, width=128, memory=2048, rate=3e-3, steps=1500)
MOE = replace(
    LLAMA,
    name="atlas-moe",
    shape="mixtral",
    pieces=0,
    memory=512,
    experts=4,
    chosen=2,
    balance=0.01,
    window=3,
    near=0.9,
    steps=500,
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in (Recipe(), LLAMA, MOE)})
