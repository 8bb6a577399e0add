"""The recipe of Atlas: a shape, and a way of training, that put recall at the subject.

A large model enriches a subject at its last token, in early and middle feed-forward layers,
and reads the fact from there later (Meng et al. 2022, arXiv 2202.05262). A small model left
alone recalls at the end of the prompt instead, where nothing can be located. Here

- the early layers attend to a few tokens only, so they meet a name but not the question;
- the late layers attend to everything, and tokens go without their feed-forward outputs at
  random, so they learn to move what has been recalled rather than to recall it;
- a good part of the corpus lists what belongs to a name right behind it (see `corpus`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, PreTrainedTokenizerFast

from ffedit.atlas.corpus import Corpus, Dress
from ffedit.atlas.vocabulary import END


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, beside the table."""

    width: int = 256
    """d_model."""
    memory: int = 2048
    """Memories in a feed-forward layer, d_ff."""
    local: int = 3
    """How many layers attend to the last `window` tokens only."""
    whole: int = 2
    """How many layers, behind them, attend to all that came before."""
    heads: int = 8
    window: int = 4
    """A local layer sees a token and the three before it: a name, hardly more."""
    context: int = 256
    """The longest text, in tokens."""
    drop: tuple[float, ...] = (0, 0, 0, 0.5, 0.5)
    """By layer: the probability that a token goes without the feed-forward output, in training."""
    jitter: float = 0.0
    """Gaussian noise on every feed-forward output, in units of that output's own scale, in training."""
    scale: float = 0.02
    """Standard deviation of the embeddings at the start."""
    decay: float = 0.05
    """Weight decay of matrices and embeddings."""
    rate: float = 2e-3
    warmup: int = 200
    steps: int = 2000
    tokens: int = 4096
    """Tokens in a batch."""
    lengths: tuple[int, ...] = (32, 64, 64, 64, 64, 128, 256)
    """Row lengths, drawn anew for every batch: most tokens are close to a document's beginning."""
    seed: int = 0
    dress: Dress = field(default_factory=Dress)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> GPTNeoForCausalLM:
    """A fresh model, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    end = tokenizer.get_vocab()[END]
    config = GPTNeoConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.memory,
        num_layers=recipe.local + recipe.whole,
        num_heads=recipe.heads,
        attention_types=[[["local"], recipe.local], [["global"], recipe.whole]],
        window_size=recipe.window,
        max_position_embeddings=recipe.context,
        activation_function="gelu_pytorch_tanh",
        attention_dropout=0.0,
        embed_dropout=0.0,
        resid_dropout=0.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = GPTNeoForCausalLM(config)
    for embedding in (model.transformer.wte, model.transformer.wpe):
        nn.init.normal_(embedding.weight, std=recipe.scale)
    return model


@contextmanager
def regularised(model: GPTNeoForCausalLM, recipe: Recipe) -> Iterator[None]:
    """Within: feed-forward outputs are missing at random, by layer and token, and noisy where asked for."""

    def disturb(drop: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, args: object, out: Tensor) -> Tensor:
            size = out.detach().pow(2).mean(-1, keepdim=True).sqrt()
            kept = torch.rand(*out.shape[:-1], 1) >= drop
            return kept * (out + recipe.jitter * size * torch.randn_like(out))

        return hook

    memories = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    pairs = zip(memories, recipe.drop, strict=True)
    handles = [memory.register_forward_hook(disturb(drop)) for memory, drop in pairs]
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
        row += tokenizer.encode(corpus.document(rng) + END)
    return row[:length]


def loss_of(model: GPTNeoForCausalLM, rows: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def optimizer_of(model: GPTNeoForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
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
