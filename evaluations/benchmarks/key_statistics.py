"""Time the collection of key statistics against one pass for each layer.

    python evaluations/benchmarks/key_statistics.py [--out FILE.json] [--rounds N] [--threads N] [--tokens N]

GPT-2 124M shapes, random weights, layers 7 to 11, the first token of each row left out. `ffedit.editor.collect`
and the plain way run in one process, by turns, on the same tokens, in the same batches, with the same threads and
precision: products of a batch in float32, the sum over batches in float64. The plain way makes one pass for each layer,
which ends there, before the value matrix (nothing above runs, no gradient, no cache, no copy), and whole products of
keys with keys.

ffedit's seconds include all that `collect` does: reading the text, fingerprints, both halves, the convergence figure,
and writing the statistics to a fresh cache. The reference's seconds are those of the sums alone.

    ratio      seconds of the reference / seconds of ffedit; median over the rounds, with the smallest and largest
    ceiling    multiply-accumulates of the reference / those needed: one pass, half of each product (it is symmetric)
    one pass   the same if products were computed whole, as in the reference
    memory     peak resident memory above that of the loaded model, each in a fresh process; and of the whole processes
    equal      largest relative difference of the sums (Frobenius norm)
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import measuring
import torch
from torch import Tensor
from transformers import GPT2Config

import ffedit
from ffedit.editor.statistics import collect

LAYERS = range(7, 12)
ROW, ROWS = 64, 64
WORDS, SEED = 2000, 0
TOLERANCE = 1e-6


class Arrived(Exception):
    """Ends a pass at the requested keys, which it carries."""


def keys_of(editable: ffedit.Editable, memory: ffedit.KeyValueMemory, rows: Tensor) -> Tensor:
    """Return the keys of `rows` [n, tokens], [n · tokens, d_ff]; nothing runs after them."""

    def arrive(_: Any, inputs: tuple[Tensor]) -> None:
        raise Arrived(inputs[0])

    hook = memory.module.register_forward_pre_hook(arrive)
    try:
        editable.model(input_ids=rows, use_cache=False)
    except Arrived as arrived:
        keys: Tensor = arrived.args[0]
    finally:
        hook.remove()
    return keys.reshape(-1, keys.shape[-1])


@torch.no_grad()
def plain(editable: ffedit.Editable, ids: Tensor) -> list[Tensor]:
    """Return Σ w k kᵀ of each of `LAYERS` over `ids` [n], a whole number of rows: one pass for each layer."""
    weights = torch.full((len(ids), 1), (ROW / (ROW - 1)) ** 0.5)
    weights[::ROW] = 0
    sums = []
    for memory in (editable.memories[layer] for layer in LAYERS):
        total = torch.zeros(memory.d_ff, memory.d_ff, dtype=torch.float64)
        for rows, row_weights in zip(ids.view(-1, ROW).split(ROWS), weights.split(ROW * ROWS), strict=True):
            keys = keys_of(editable, memory, rows) * row_weights
            total += keys.T @ keys
        sums.append(total)
    return sums


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Use an empty cache in the block."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FFEDIT_CACHE=folder):
        yield


def ours(editable: ffedit.Editable, path: Path, tokens: int) -> list[Tensor]:
    """Return the same sums, collected by ffedit."""
    with fresh_cache():
        collected = collect(editable, [editable.memories[layer] for layer in LAYERS], ffedit.Corpus(path, tokens))
    return [moments.sum for moments in collected.values()]


def load(folder: Path, tokens: int) -> tuple[ffedit.Editable, Path, Tensor]:
    """Return the model, a text of random words, some frequent and most rare, and its token ids."""
    rng = random.Random(SEED)
    chances = [1 / (rank + 1) for rank in range(WORDS)]
    (path := folder / "text.txt").write_text(" ".join(f"w{i}" for i in rng.choices(range(WORDS), chances, k=tokens)))
    editable = measuring.random_gpt2(GPT2Config(), WORDS, SEED)
    return editable, path, torch.tensor(editable.tokenizer(path.read_text())["input_ids"])


def peaks(side: str, tokens: int, threads: int) -> tuple[int, int]:
    """Return the bytes of this process with the model loaded and warm, and its peak while collecting."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        editable, path, ids = load(Path(folder), tokens)
        editable.model(input_ids=ids[None, :2], use_cache=False)
        loaded = measuring.forget_peak()
        if side == "ffedit":
            ours(editable, path, tokens)
        else:
            plain(editable, ids)
        return loaded, measuring.peak()


def products(editable: ffedit.Editable, tokens: int) -> dict[str, int]:
    """Return multiply-accumulates: of the reference, of one pass with whole products, and those needed.

    A pass to a layer's keys costs the matrices of the layers below and its own without the value matrix. Attention's
    products of queries, keys and weights are left out.
    """
    layers, _ = measuring.matrix_entries(editable)
    to = {n: sum(layers[: n + 1]) - editable.memories[n].value.numel() for n in LAYERS}
    square = sum(editable.memories[n].d_ff ** 2 for n in LAYERS)
    half = sum(d * (d + 1) // 2 for d in (editable.memories[n].d_ff for n in LAYERS))
    last = to[LAYERS[-1]]
    per_token = {"reference": sum(to.values()) + square, "one_pass": last + square, "needed": last + half}
    return {name: tokens * count for name, count in per_token.items()}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads, help="Default: torch's own.")
@click.option("--tokens", type=click.IntRange(min=1), default=16_384, show_default=True, help="Rounded to whole rows.")
def main(out: Path | None, rounds: int, threads: int, tokens: int) -> None:
    """Time collecting against one pass for each layer; exits with 1 where the sums are not equal."""
    tokens = -(-tokens // ROW) * ROW
    load_before = measuring.load_before(threads)
    memory = measuring.memory(peaks, min(tokens, 2 * ROW * ROWS), threads)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        editable, path, ids = load(Path(folder), tokens)
        warm = ids[: ROW * ROWS]
        ours(editable, path, len(warm))
        plain(editable, warm)
        speed = measuring.matmul_speed()
        sides = {"ffedit": lambda _: ours(editable, path, tokens), "reference": lambda _: plain(editable, ids)}
        seconds, results = measuring.rounds(sides, rounds)
        speed = median([speed, measuring.matmul_speed()])
    counted = products(editable, tokens)
    both = zip(results["ffedit"], results["reference"], strict=True)
    pairs = [pair for ours_now, plain_now in both for pair in zip(ours_now, plain_now, strict=True)]
    difference = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    held = measuring.held(seconds["ffedit"], seconds["reference"], counted["reference"], counted["needed"], speed)
    row = {
        "title": f"GPT-2 124M, key statistics of layers {LAYERS[0]} to {LAYERS[-1]}, {tokens:,} tokens",
        "tokens": tokens,
        "layers": list(LAYERS),
        **held,
        "one_pass": counted["reference"] / counted["one_pass"],
        "memory": memory,
        "difference": difference,
        "equal": difference <= TOLERANCE,
    }
    print(row["title"])
    print(f"    seconds   ffedit {median(seconds['ffedit']):.1f}, reference {median(seconds['reference']):.1f}")
    measuring.show_held(row)
    print(f"    one pass  {row['one_pass']:.2f} with whole products")
    measuring.show_memory(memory)
    print(f"    equal     {'yes' if row['equal'] else 'NO'}: sums differ by {difference:.1e}", flush=True)
    report = {**row, "rounds": rounds, "seed": SEED, **measuring.machine(threads, load_before)}
    measuring.finish(out, report, row["equal"])


if __name__ == "__main__":
    main()
