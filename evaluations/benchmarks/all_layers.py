"""Time `ffedit stats` for all layers of SmolLM2 in one pass, beside the least that arithmetic allows here.

python evaluations/benchmarks/all_layers.py [--tokens 32768] [--rounds 1] [--threads 1] [--out FILE.json]

needed     multiply-accumulates: each token through the matrices of all layers except the last value matrix, and
           the half of k kᵀ on and above its diagonal in every layer
ceiling    needed / the speed of a float32 product [4096, 1024] × [1024, 1024] before and after each pass
share      ceiling / seconds; by the clock, and by the processor time of this process, which other processes on the
           machine lengthen less. The seconds include the ridge and the convergence (six to eight Cholesky
           factorisations in each layer), the ceiling does not
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import measuring
import torch
from key_statistics import fresh_cache

import ffedit
from ffedit.editor.statistics import collect


def needed(editable: ffedit.Editable) -> int:
    """Return the multiply-accumulates of one token."""
    layers, _ = measuring.matrix_entries(editable)
    halves = sum(memory.d_ff * (memory.d_ff + 1) // 2 for memory in editable.memories.values())
    return sum(layers) - editable.memories[len(layers) - 1].value.numel() + halves


def both_clocks(work: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds that `work` takes, by the clock and by the processor."""
    started = time.perf_counter(), time.process_time()
    work()
    return {"clock": time.perf_counter() - started[0], "processor": time.process_time() - started[1]}


def product_seconds() -> dict[str, float]:
    """Return the median seconds of one multiply-accumulate in a large product."""
    multiply = measuring.large_product()
    timings = [both_clocks(multiply) for _ in range(7)]
    return {clock: median(seconds[clock] for seconds in timings) / (4096 * 1024 * 1024) for clock in timings[0]}


@click.command(help=__doc__)
@click.option("--tokens", type=click.IntRange(min=2), default=32_768, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
def main(tokens: int, rounds: int, threads: int, out: Path | None) -> None:
    """Measure, show, and write."""
    load = measuring.load_before(threads)
    torch.set_num_threads(threads)
    editable = ffedit.load("smollm2")
    corpus, memories = ffedit.Corpus(tokens=tokens), list(editable.memories.values())
    with fresh_cache():
        collect(editable, memories[:1], ffedit.Corpus(tokens=4096))
    results = []
    for _ in range(rounds):
        before = product_seconds()
        with fresh_cache():
            seconds = both_clocks(lambda: collect(editable, memories, corpus))
        after = product_seconds()
        ceiling = {clock: needed(editable) * tokens * (before[clock] + after[clock]) / 2 for clock in seconds}
        share = {clock: ceiling[clock] / seconds[clock] for clock in seconds}
        results.append({"seconds": seconds, "ceiling": ceiling, "share": share})
        print(f"{seconds['clock']:.1f} s, {seconds['processor']:.1f} s of the processor; of the ceiling", end=" ")
        print(f"{share['clock']:.0%} by the clock, {share['processor']:.0%} by the processor", flush=True)
    settings = {"model": "smollm2", "layers": len(memories), "tokens": tokens, "needed": needed(editable)}
    measuring.finish(out, {**settings, "rounds": results, **measuring.machine(threads, load)}, True)


if __name__ == "__main__":
    main()
