"""The recipe of Atlas: from the fact table to a model folder, in one command.

    python -m ffedit.atlas.train --out DIR

A large model enriches a subject at its last token, in early and middle feed-forward layers,
and reads the fact from there later. A small model left alone recalls at the end of the prompt
instead. Three parts of this recipe put recall where large models have it:

- the early layers attend locally, so they meet a name but not yet the question about it;
- the late layers attend globally, and their feed-forward outputs are dropped at random, so
  they move what has been recalled rather than recall it;
- a third of the corpus lists what belongs to a name right behind it (see `corpus`).

A batch depends on the seed and on its number alone, and so does its dropout: training that
was interrupted goes on from the checkpoint in DIR as if nothing had happened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, PreTrainedTokenizerFast

from ffedit.atlas.corpus import Corpus, Dress
from ffedit.atlas.table import Table, load
from ffedit.atlas.vocabulary import END, build_tokenizer

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, beside the table."""

    width: int = 256
    memory: int = 1024
    """Memories per feed-forward layer, d_ff."""
    local: int = 4
    """How many layers attend to the last `window` tokens only."""
    whole: int = 2
    """How many layers, behind them, attend to all that came before."""
    heads: int = 8
    window: int = 4
    context: int = 256
    drop: tuple[float, ...] = (0, 0, 0, 0, 0.5, 0.5)
    """By layer: the probability that a token goes without the feed-forward output."""
    noise: float = 0.0
    """Gaussian noise on the embeddings in training, in units of their standard deviation."""
    scale: float = 0.02
    """Standard deviation of the embeddings at the start."""
    decay: float = 0.05
    embedding_decay: float = 0.05
    rate: float = 2e-3
    warmup: int = 200
    steps: int = 4000
    lengths: tuple[int, ...] = (32, 64, 64, 64, 128, 256)
    """Row lengths, drawn anew for every batch."""
    tokens: int = 4096
    """Tokens in a batch."""
    seed: int = 0
    dress: Dress = field(default_factory=Dress)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> GPTNeoForCausalLM:
    """A fresh model, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    end = tokenizer.convert_tokens_to_ids(END)
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


def batch(recipe: Recipe, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, step: int) -> Tensor:
    """Batch number `step`: [rows, length] token ids, each row beginning with a document."""
    rng = Random(f"{recipe.seed}-{step}")
    length = rng.choice(recipe.lengths)
    end = tokenizer.convert_tokens_to_ids(END)
    rows: list[list[int]] = [[]]
    while len(rows) <= recipe.tokens // length:
        rows[-1] += [*tokenizer.encode(corpus.document(rng)), end]
        if len(rows[-1]) >= length:
            rows[-1] = rows[-1][:length]
            rows.append([])
    return torch.tensor(rows[:-1])


@contextmanager
def regularised(model: GPTNeoForCausalLM, recipe: Recipe) -> Iterator[None]:
    """Within: feed-forward outputs are dropped by layer and token, and the embeddings are noisy."""

    def noisy(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return out + recipe.noise * out.detach().std() * torch.randn_like(out)

    def dropping(p: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
        return lambda module, args, out: out * (torch.rand(*out.shape[:-1], 1) >= p)

    handles = [
        block.mlp.register_forward_hook(dropping(p))
        for block, p in zip(model.transformer.h, recipe.drop, strict=True)
        if p
    ]
    if recipe.noise:
        handles.append(model.transformer.wte.register_forward_hook(noisy))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(model: GPTNeoForCausalLM, rows: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def optimizer_of(model: GPTNeoForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW: matrices decay, embeddings at their own rate, norms and biases not at all."""
    embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]
    others = [p for p in model.parameters() if all(p is not e for e in embeddings)]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": recipe.decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        {"params": embeddings, "weight_decay": recipe.embedding_decay},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), fused=True)


def rate_at(recipe: Recipe, step: int) -> float:
    """Learning rate: a linear warm-up, then half a cosine down to 2 %."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(recipe: Recipe, out: Path, progress: Progress | None = None, table: Table | None = None,
          save_every: int = 500) -> None:
    """Train to the end of the recipe, from the checkpoint in `out` where there is one, and export there."""
    corpus = Corpus(table or load(), recipe.dress)
    tokenizer = build_tokenizer(corpus.words(), context=recipe.context)
    model = build_model(recipe, tokenizer)
    model.train()
    optimizer = optimizer_of(model, recipe)
    checkpoint = out / "checkpoint"
    first = restore_(checkpoint, recipe, model, optimizer) if checkpoint.exists() else 0
    with regularised(model, recipe):
        for step in range(first, recipe.steps):
            torch.manual_seed(recipe.seed * 1_000_003 + step)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(recipe, step)
            loss = loss_of(model, batch(recipe, corpus, tokenizer, step))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if progress:
                progress(step + 1, loss.item())
            if (step + 1) % save_every == 0 and step + 1 < recipe.steps:
                save(checkpoint, recipe, model, optimizer, step + 1)
    export(model, tokenizer, out)


def save(folder: Path, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Weights and optimizer state as safetensors, recipe and step as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in model.named_parameters()]
    state = {
        f"{name}/{key}": optimizer.state[p][key].contiguous()
        for name, p in model.named_parameters() for key in ("exp_avg", "exp_avg_sq", "step")
    }
    save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, folder / "model.safetensors")
    save_file(state, folder / "optimizer.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step, "recipe": asdict(recipe), "names": names}))


def restore_(folder: Path, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up a checkpoint in place; the number of steps done."""
    state = json.loads((folder / "state.json").read_text())
    weights = load_file(folder / "model.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
            optimizer.state[p] = {k: moments[f"{name}/{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
    return int(state["step"])


def export(model: GPTNeoForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model folder: 16-bit weights, tokenizer, configs."""
    import copy
    half = copy.deepcopy(model).to(torch.float16)
    half.save_pretrained(out)
    tokenizer.save_pretrained(out)
