"""What it costs to look at every memory: the streaming pass of `ffedit inspect model` against plain forward passes.

    python evaluations/benchmarks/inspection.py [--out FILE.json] [--rounds N] [--threads N] [--tokens N]

GPT-2 124M shapes, random weights: 12 layers of 3,072 memories, the top 50 triggers of each, and a sample of positions.
Both sides run the same tokens in the same batches, by turns, in one process. ffedit's seconds hold the whole pass:
reading the text, hashing prefixes, all layers' triggers, the sample, writing rows and state to disk. The plain passes
are `model(input_ids)`; since the pass needs no logits, plain passes without the unembedding are timed too.

    ratio      seconds of ffedit / seconds of the plain passes; median over the rounds, with the smallest and largest
    memory     peak resident memory above that of the loaded model, in fresh processes, for one and four times the text
    equal      the triggers are those of a plain loop over the captured coefficients (largest difference)
"""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import measuring
import torch
from torch import Tensor
from transformers import GPT2Config

import ffedit
from ffedit.inference.corpus import Corpus
from ffedit.inference.text import ROW_TOKENS
from ffedit.inspector.memory_pass import TOKENS_PER_BATCH, Pass, Settings, collect, started
from ffedit.inspector.rows import rows_of
from ffedit.model.hooks import capture

WORDS, SEED = 2000, 0
BATCH = TOKENS_PER_BATCH // ROW_TOKENS
TOLERANCE = 1e-5


def load(folder: Path, tokens: int) -> tuple[ffedit.Editable, Corpus, Tensor]:
    """The model, a text of random words, some frequent and most rare, and its rows of ids [rows, ROW_TOKENS]."""
    rng = random.Random(SEED)
    chances = [1 / (rank + 1) for rank in range(WORDS)]
    path = folder / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in rng.choices(range(WORDS), chances, k=tokens + 1)))
    editable = measuring.random_gpt2(GPT2Config(), WORDS, SEED)
    corpus = Corpus(path, tokens)
    return editable, corpus, torch.tensor([row[:-1] for row in rows_of(editable, corpus)])


def ours(editable: ffedit.Editable, corpus: Corpus, top: int) -> Pass:
    """The streaming pass, to disk."""
    state = started(editable, {"settings": asdict(Settings(top=top))})
    with tempfile.TemporaryDirectory() as folder:
        collect(editable, rows_of(editable, corpus), corpus.tokens, state, Path(folder))
    return state


@torch.no_grad()
def plain(editable: ffedit.Editable, ids: Tensor, logits: bool = True) -> None:
    """Forward passes, and nothing else."""
    model = editable.model if logits else editable.model.transformer
    for rows in ids.split(BATCH):
        model(input_ids=rows, use_cache=False)


@torch.no_grad()
def difference(editable: ffedit.Editable, ids: Tensor, state: Pass, top: int) -> float:
    """How far the largest coefficients are from those of a plain loop that keeps all of them, at most."""
    worst = 0.0
    for layer, memory in editable.memories.items():
        kept = []
        for rows in ids.split(BATCH):
            with capture({0: memory.module}, inputs=True) as seen:
                editable.model.transformer(input_ids=rows, use_cache=False)
            kept.append(seen[0].flatten(0, 1))
        prefixes = {tuple(row[: end + 1]): i for i, (row, end) in enumerate(places(ids))}
        keys = torch.cat(kept)[list(prefixes.values())]
        expected = keys.topk(top, dim=0).values.T.clamp(min=0)
        worst = max(worst, float((expected - state.triggers[layer.layer].coefficients).abs().max()))
    return worst


def places(ids: Tensor) -> list[tuple[list[int], int]]:
    """Each position of each row."""
    return [(row, end) for row in ids.tolist() for end in range(len(row))]


def peak(tokens: int, top: int, threads: int) -> tuple[int, int]:
    """Bytes of this process with the model loaded and warm, and at the peak of the pass."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        editable, corpus, ids = load(Path(folder), tokens)
        plain(editable, ids[:2])
        del ids
        loaded = measuring.forget_peak()
        ours(editable, corpus, top)
        return loaded, measuring.peak()


def peaks(tokens: int, top: int, threads: int) -> dict[str, float]:
    """MiB above the loaded model, for one and four times the text."""
    found = {}
    for times in (1, 4):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            loaded, highest = pool.submit(peak, times * tokens, top, threads).result()
        found[f"{times}x"] = (highest - loaded) / measuring.MiB
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads, help="Default: torch's own.")
@click.option("--tokens", type=click.IntRange(min=1), default=16_384, show_default=True, help="Rounded to whole rows.")
@click.option("--top", type=click.IntRange(min=1), default=50, show_default=True, help="Triggers of each key.")
def main(out: Path | None, rounds: int, threads: int, tokens: int, top: int) -> None:
    """Time the pass against plain forward passes; exits with 1 where the triggers are not equal."""
    tokens = -(-tokens // (BATCH * ROW_TOKENS)) * BATCH * ROW_TOKENS
    load_before = measuring.load_before(threads)
    memory = peaks(tokens, top, threads)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        editable, corpus, ids = load(Path(folder), tokens)
        plain(editable, ids[:BATCH])
        ours(editable, Corpus(corpus.path, BATCH * ROW_TOKENS), top)
        sides: dict[str, Any] = {
            "ffedit": lambda _: ours(editable, corpus, top),
            "plain": lambda _: plain(editable, ids),
            "without unembedding": lambda _: plain(editable, ids, logits=False),
        }
        seconds, _ = measuring.rounds(sides, rounds)
        worst = difference(
            editable, ids[: 2 * BATCH], ours(editable, Corpus(corpus.path, 2 * BATCH * ROW_TOKENS), top), top
        )
    ratios = {
        name: measuring.spread(a / b for a, b in zip(seconds["ffedit"], seconds[name], strict=True))
        for name in ("plain", "without unembedding")
    }
    row = {
        "title": f"GPT-2 124M, top {top} triggers of 12 × 3,072 keys, {tokens:,} tokens",
        "tokens": tokens,
        "seconds": seconds,
        "ratio": ratios["plain"],
        "ratio_without_unembedding": ratios["without unembedding"],
        "memory": memory,
        "difference": worst,
        "equal": worst <= TOLERANCE,
    }
    print(row["title"])
    print(f"    seconds   {', '.join(f'{n} {measuring.shown(measuring.spread(s), 1)}' for n, s in seconds.items())}")
    print(f"    ratio     {measuring.shown(ratios['plain'])} of plain passes")
    print(f"              {measuring.shown(ratios['without unembedding'])} of plain passes without the unembedding")
    print(
        f"    memory    {memory['1x']:.0f} MiB above the loaded model, {memory['4x']:.0f} MiB for four times the text"
    )
    print(f"    equal     {'yes' if row['equal'] else 'NO'}: coefficients differ by {worst:.1e}", flush=True)
    report = {**row, "rounds": rounds, "seed": SEED, **measuring.machine(threads, load_before)}
    measuring.finish(out, report, row["equal"])


if __name__ == "__main__":
    main()
