"""How a benchmark measures: sides by turns in one run, memory in fresh processes, operations counted, seconds drawn.

Seconds of two runs on a shared machine say little about each other. So all sides of a comparison run in one process, by
turns, after a warm-up, and a ratio is taken round by round: `rounds`, `spread`, `held`.

Memory is the peak of a whole fresh process, and what it is above that of the loaded model: `forget_peak`, `peak`,
`memory`.

Arithmetic is counted in multiply-accumulates with the matrices of the model (`matrix_entries`), so that a ratio can be
held against what sparing operations can give at best, and a time against how fast this machine multiplies
(`matmul_speed`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import ffedit
from ffedit.benchmark.hardware import processor
from ffedit.editor.provenance import versions
from ffedit.inference.precision import float32_product

sys.path.append(str(Path(__file__).parents[2] / "tests" / "reference"))  # the plain loops that benchmarks compare with
MiB = 2**20


def random_gpt2(config: GPT2Config, words: int, seed: int = 0) -> ffedit.Editable:
    """A GPT-2 of random weights, and a tokenizer of so many words (`word_tokenizer`)."""
    torch.manual_seed(seed)
    return ffedit.load((GPT2LMHeadModel(config).eval(), word_tokenizer(config.vocab_size, words)))


def word_tokenizer(vocabulary: int, words: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0 … w{words − 1}, spread over the vocabulary, and one more for all others."""
    known = [f"w{i}" for i in range(words + 1)]
    step = (vocabulary - 1) // len(known)
    backend = Tokenizer(models.WordLevel({word: i * step for i, word in enumerate(known)}, unk_token=known[-1]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=known[-1], eos_token=known[-1])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that `work` takes, and what it gives."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def rounds(
    sides: Mapping[str, Callable[[int], Any]], count: int
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Let the sides take turns `count` times; who begins changes from round to round.

    Args:
        sides: by name, what is timed, called with the round's number. Every one should have run once before.
        count: rounds.

    Returns:
        By side, its seconds, round by round; and what it gave.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(count):
        for name in reversed(sides) if number % 2 else sides:
            passed, result = timed(lambda work=sides[name], number=number: work(number))
            seconds[name].append(passed)
            results[name].append(result)
    return seconds, results


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    some = list(values)
    return {"median": median(some), "min": min(some), "max": max(some)}


def held(ours: Sequence[float], theirs: Sequence[float], published: int, needed: int, speed: float) -> dict[str, Any]:
    """Seconds of both sides, held against arithmetic and against the machine.

    Args:
        ours: seconds of ffedit, by round.
        theirs: seconds of the reference, by round.
        published: multiply-accumulates of the reference.
        needed: those that the task needs.
        speed: multiply-accumulates per second that this machine reaches.

    Returns:
        "ratio" of the seconds; "ceiling", that of the multiply-accumulates; "reached", ratio / ceiling; "matmul_share",
        which share of `speed` each side comes to; and what was given.
    """
    ratio = spread(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "seconds": {"ffedit": list(ours), "reference": list(theirs)},
        "ratio": ratio,
        "ceiling": published / needed,
        "reached": ratio["median"] * needed / published,
        "products": {"reference": published, "needed": needed},
        "matmul_per_second": speed,
        "matmul_share": {"ffedit": needed / median(ours) / speed, "reference": published / median(theirs) / speed},
    }


def show_held(row: Mapping[str, Any]) -> None:
    """What `held` returned, in lines."""
    share, speed = row["matmul_share"], row["matmul_per_second"]
    print(f"    ratio     {shown(row['ratio'])}, ceiling {row['ceiling']:.2f}, reached {row['reached']:.0%}")
    print(
        f"    matmul    ffedit {share['ffedit']:.0%}, reference {share['reference']:.0%} of {2e-9 * speed:.0f} GFLOP/s"
    )


def shown(values: Mapping[str, float], digits: int = 2) -> str:
    """A `spread` in words: median (smallest to largest)."""
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"


def matrix_entries(editable: ffedit.Editable) -> tuple[list[int], int]:
    """Entries of each layer's matrices, and of the unembedding's: the multiply-accumulates of one token.

    What is left out: products of queries with keys and of their weights with values, and all that is no matrix product.
    """
    weight = editable.unembedding.weight
    assert isinstance(weight, Tensor)
    return [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in editable.layers], weight.numel()


def large_product() -> Callable[[], float]:
    """Return a float32 product [4096, 1024] × [1024, 1024] as a model's linear layers compute it; it has run once."""
    multiply = float32_product(4096, 1024, torch.device("cpu"))
    multiply()
    return multiply


def matmul_speed(repeats: int = 7) -> float:
    """Multiply-accumulates per second of `large_product`; median."""
    multiply = large_product()
    return 4096 * 1024 * 1024 / median([timed(multiply)[0] for _ in range(repeats)])


def forget_peak() -> int:
    """Begin a new peak of resident memory where the system allows it (Linux), and return the present one, in bytes.

    Otherwise what was needed only while the model was loaded would hide what is measured.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


def peak() -> int:
    """The peak of this process's resident memory, in bytes.

    On Linux `ru_maxrss` begins with the parent's peak, `VmHWM` does not; elsewhere there is `ru_maxrss` alone.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory(measured: Callable[..., tuple[int, int]], *given: Any) -> dict[str, float]:
    """Peak memory of "ffedit" and of the "reference", each in a fresh process.

    Args:
        measured: a function of a module; called with the side's name and `given`, it returns `forget_peak()` with the
            model loaded and warm, and `peak()` after the work.
        given: what else it is called with.

    Returns:
        By side, MiB above the loaded model; "ratio" of these, and "whole_ratio" of the whole processes, both
        ffedit / reference.
    """
    above, whole = {}, {}
    for side in ("ffedit", "reference"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            loaded, highest = pool.submit(measured, side, *given).result()
        above[side], whole[side] = (highest - loaded) / MiB, highest / MiB
    return {
        **above,
        "ratio": above["ffedit"] / above["reference"],
        "whole_ratio": whole["ffedit"] / whole["reference"],
    }


def show_memory(peaks: Mapping[str, float]) -> None:
    """What `memory` returned, in a line."""
    print(
        f"    memory    ffedit {peaks['ffedit']:.0f} MiB, reference {peaks['reference']:.0f} MiB, "
        f"ratio {peaks['ratio']:.2f} (of the whole processes {peaks['whole_ratio']:.2f})"
    )


def load_before(threads: int) -> float:
    """Threads that were running before this began, the last minute's mean; says so where they leave no free cores."""
    load = os.getloadavg()[0]
    if load + threads > (os.cpu_count() or 1) + 0.5:
        print(f"{load:.1f} threads were running on {os.cpu_count()} cores before this began: the seconds mean little")
    return load


def machine(threads: int, load: float) -> dict[str, Any]:
    """Where and with what it was measured; `load` is that of `load_before`."""
    return {
        "threads": threads,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": {"before": load, "after": os.getloadavg()[0]},
        "dtype": "float32",
        "versions": versions(),
    }


def finish(out: Path | None, report: Mapping[str, Any], equal: bool) -> None:
    """Write a report where `out` says, and exit with 1 where the two sides did not find the same."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not equal:
        sys.exit(1)
