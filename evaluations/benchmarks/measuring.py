"""Helpers of the benchmarks: sides timed by turns in one run, memory in fresh processes, operations counted.

Seconds of two runs on a shared machine say little about each other. So all sides of a comparison run in one process, by
turns, after a warm-up, and a ratio is taken round by round: `rounds`, `spread`, `held`.

Memory is the peak of a whole fresh process, and its excess over the loaded model: `forget_peak`, `peak`, `memory`.

Arithmetic is counted in multiply-accumulates with the matrices of the model (`matrix_entries`), so that a ratio can be
compared with the best that fewer operations allow, and a time with the speed at which this machine multiplies
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
    """Return a GPT-2 of random weights with a tokenizer of `words` words (`word_tokenizer`)."""
    torch.manual_seed(seed)
    return ffedit.load((GPT2LMHeadModel(config).eval(), word_tokenizer(config.vocab_size, words)))


def word_tokenizer(vocabulary: int, words: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0 … w{words − 1}, spread over the vocabulary, and one more for all others."""
    names = [f"w{i}" for i in range(words + 1)]
    step = (vocabulary - 1) // len(names)
    backend = Tokenizer(models.WordLevel({word: i * step for i, word in enumerate(names)}, unk_token=names[-1]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=names[-1], eos_token=names[-1])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that `work` takes, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def rounds(
    sides: Mapping[str, Callable[[int], Any]], count: int
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Let the sides take turns `count` times; the side that begins changes from round to round.

    Args:
        sides: by name, the function to time, called with the round's number. Each should have run once before.
        count: number of rounds.

    Returns:
        By side, the seconds of each round; and by side, the result of each round.
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
    """Return the median, smallest and largest value."""
    numbers = list(values)
    return {"median": median(numbers), "min": min(numbers), "max": max(numbers)}


def held(ours: Sequence[float], theirs: Sequence[float], published: int, needed: int, speed: float) -> dict[str, Any]:
    """Compare the seconds of both sides with arithmetic and with the speed of the machine.

    Args:
        ours: seconds of ffedit, by round.
        theirs: seconds of the reference, by round.
        published: multiply-accumulates of the reference.
        needed: those that the task needs.
        speed: multiply-accumulates per second that this machine reaches.

    Returns:
        "ratio" of the seconds; "ceiling", that of the multiply-accumulates; "reached", ratio / ceiling; "matmul_share",
        the share of `speed` that each side reaches; and the arguments.
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
    """Print the result of `held`."""
    share, speed = row["matmul_share"], row["matmul_per_second"]
    print(f"    ratio     {shown(row['ratio'])}, ceiling {row['ceiling']:.2f}, reached {row['reached']:.0%}")
    print(
        f"    matmul    ffedit {share['ffedit']:.0%}, reference {share['reference']:.0%} of {2e-9 * speed:.0f} GFLOP/s"
    )


def shown(values: Mapping[str, float], digits: int = 2) -> str:
    """Format a `spread`: median (smallest to largest)."""
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"


def matrix_entries(editable: ffedit.Editable) -> tuple[list[int], int]:
    """Return the entries of each layer's matrices and of the unembedding: the multiply-accumulates of one token.

    Products of queries with keys and of their weights with values are left out, and all operations but matrix products.
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
    """Return the median multiply-accumulates per second of `large_product`."""
    multiply = large_product()
    return 4096 * 1024 * 1024 / median([timed(multiply)[0] for _ in range(repeats)])


def forget_peak() -> int:
    """Reset the peak of resident memory where the system allows it (Linux), and return the present one, in bytes.

    Otherwise memory that only loading the model needed would hide the memory of the work.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


def peak() -> int:
    """Return the peak of this process's resident memory, in bytes.

    On Linux `ru_maxrss` begins with the parent's peak, `VmHWM` does not; elsewhere there is `ru_maxrss` alone.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory(measured: Callable[..., tuple[int, int]], *arguments: Any) -> dict[str, float]:
    """Measure the peak memory of "ffedit" and of the "reference", each in a fresh process.

    Args:
        measured: a function of a module; called with the side's name and `arguments`, it returns `forget_peak()` with
            the model loaded and warm, and `peak()` after the work.
        arguments: further arguments of `measured`.

    Returns:
        By side, MiB above the loaded model; "ratio" of these, and "whole_ratio" of the whole processes, both
        ffedit / reference.
    """
    above, whole = {}, {}
    for side in ("ffedit", "reference"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            loaded, highest = pool.submit(measured, side, *arguments).result()
        above[side], whole[side] = (highest - loaded) / MiB, highest / MiB
    return {
        **above,
        "ratio": above["ffedit"] / above["reference"],
        "whole_ratio": whole["ffedit"] / whole["reference"],
    }


def show_memory(peaks: Mapping[str, float]) -> None:
    """Print the result of `memory` in a line."""
    print(
        f"    memory    ffedit {peaks['ffedit']:.0f} MiB, reference {peaks['reference']:.0f} MiB, "
        f"ratio {peaks['ratio']:.2f} (of the whole processes {peaks['whole_ratio']:.2f})"
    )


def load_before(threads: int) -> float:
    """Return the mean number of running threads in the last minute, and print it if too few cores are free."""
    load = os.getloadavg()[0]
    if load + threads > (os.cpu_count() or 1) + 0.5:
        print(f"{load:.1f} threads were running on {os.cpu_count()} cores before this began: the seconds mean little")
    return load


def machine(threads: int, load: float) -> dict[str, Any]:
    """Describe the machine and the versions; `load` is that of `load_before`."""
    return {
        "threads": threads,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": {"before": load, "after": os.getloadavg()[0]},
        "dtype": "float32",
        "versions": versions(),
    }


def finish(out: Path | None, report: Mapping[str, Any], equal: bool) -> None:
    """Write a report to `out`, if any, and exit with 1 if the results of the two sides are not equal."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not equal:
        sys.exit(1)
