"""Compare every step of an edit on an accelerator with the CPU, and measure its seconds and memory at three sizes.

    python evaluations/benchmarks/gpu.py [--device cuda] [--shapes 124M,1.5B,8B] [--out FILE.json]

Needs a device; `--device cpu --shapes tiny` tries the script itself. Random weights: GPT-2 124M and GPT-2 XL in
float32, Llama 3 8B in bfloat16, whose 16 GB are made on the device.

    equal      124M (and tiny) only: the same weights on the CPU and on the device, and the largest difference of traced
               effects, k*, v*, Δ and scores, each relative to its own size, beside the allowed one
    seconds    of each step, the device synchronised before and after
    memory     most bytes that torch held on the device at any moment of the step, including the weights

Exits with 1 where a difference is larger than allowed.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import measuring
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

import ffedit

WORDS, SEED, TOKENS, STEPS, FACTS = 400, 0, 4096, 5, 8
SHAPES: dict[str, tuple[PretrainedConfig, torch.dtype]] = {
    "tiny": (GPT2Config(vocab_size=1000, n_embd=64, n_layer=4, n_head=4), torch.float32),
    "124M": (GPT2Config(), torch.float32),
    "1.5B": (GPT2Config(n_embd=1600, n_layer=48, n_head=25), torch.float32),
    "8B": (
        LlamaConfig(
            vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
        ),
        torch.bfloat16,
    ),
}  # fmt: skip
# Float32 products of two devices differ in their last bits; steps of v* divide by the length of a gradient.
ALLOWED = {"effects": 1e-3, "keys": 1e-4, "values": 1e-3, "delta": 1e-3, "scores": 1e-3}
COMPARED = ("tiny", "124M")
CONFIG = ffedit.EditConfig(value=ffedit.ValueConfig(steps=STEPS, target_probability=2.0))


def random_model(name: str, device: torch.device) -> ffedit.Editable:
    """Return a model of one of `SHAPES` with random weights, made on `device`."""
    config, dtype = SHAPES[name]
    torch.manual_seed(SEED)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return ffedit.load((model, measuring.word_tokenizer(config.vocab_size, WORDS)))


def facts() -> list[ffedit.Fact]:
    """Return facts of different subjects, each with a paraphrase and a neighbor."""
    return [
        ffedit.Fact(f"w{i} w{i + 50}", "w7 {} w8 w9 w10", f"w{i + 100}", f"w{i + 200}", (f"w20 w{i} w{i + 50} w22",),
                    (f"w7 w{i + 300} w8 w9 w10",))
        for i in range(FACTS)
    ]  # fmt: skip


def steps(editable: ffedit.Editable, layer: int) -> Iterator[tuple[str, Callable[[], dict[str, Tensor]]]]:
    """Yield each step of an edit: its name, and a function that runs it and returns the tensors to compare."""
    stats: dict[ffedit.Address, ffedit.KeyMoments] = {}
    edits: list[ffedit.Edit] = []

    def locate() -> dict[str, Tensor]:
        trace = ffedit.locate(editable, facts()[0], samples=2)
        return {"effects": torch.as_tensor(trace.effects)}

    def collect() -> dict[str, Tensor]:
        stats.update(ffedit.collect_stats(editable, layer, corpus=ffedit.Corpus(tokens=TOKENS, seed=SEED)))
        return {}

    def write() -> dict[str, Tensor]:
        edits.append(ffedit.edit(editable, facts(), layers=layer, config=CONFIG, stats=stats))
        at = edits[0].updates.keys()
        return {
            "keys": torch.cat([edits[0].keys[address].cpu() for address in at]),
            "values": torch.cat([edits[0].values[address].cpu() for address in at]),
            "delta": torch.cat([edits[0].updates[address].dense.cpu() for address in at]),
        }

    def evaluate() -> dict[str, Tensor]:
        report = ffedit.evaluate(editable, facts(), edits[0])
        scores = [value for side in (report.before, report.after) for value in side.to_dict().values()]
        return {"scores": torch.tensor([value for value in scores if value is not None])}

    yield from {"locate": locate, "statistics": collect, "edit": write, "evaluate": evaluate}.items()


@contextmanager
def synchronised(device: torch.device, row: dict[str, Any]) -> Iterator[None]:
    """Add the seconds of the block to `row`, and the most bytes that torch held on the device, where it counts them."""
    counted = device.type == "cuda"
    if counted:
        torch.cuda.reset_peak_memory_stats(device)
    wait(device)
    started = time.perf_counter()
    yield
    wait(device)
    row["seconds"] = time.perf_counter() - started
    row["memory"] = torch.cuda.max_memory_allocated(device) if counted else None


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(name: str, device: torch.device) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run every step on the device, and also on the CPU if the two are compared."""
    loading: dict[str, Any] = {"step": "load"}
    with synchronised(device, loading):
        editable = random_model(name, device)
    layer, rows, results = len(editable.layers) // 3, [loading], {}
    for step, work in steps(editable, layer):
        rows.append({"step": step})
        with synchronised(device, rows[-1]):
            results |= work()
    if name not in COMPARED:
        return rows, {}
    copied = copy.deepcopy(editable.model).to("cpu")
    cpu, expected = ffedit.load((copied, editable.tokenizer)), {}
    for _, work in steps(cpu, layer):
        expected |= work()
    return rows, {
        what: float((results[what] - right).norm() / right.norm().clamp(min=1e-30)) for what, right in expected.items()
    }


@click.command(help=__doc__)
@click.option("--device", help="By default the accelerator that torch finds.")
@click.option("--shapes", default="124M,1.5B,8B", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
def main(device: str | None, shapes: str, out: Path | None) -> None:
    """Measure each shape, show, and write."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None and accelerator is None:
        sys.exit("torch finds no accelerator; `--device cpu --shapes tiny` tries the script")
    target, load = torch.device(device or accelerator), measuring.load_before(torch.get_num_threads())
    report: dict[str, Any] = {"device": str(target), "shapes": {}, "allowed": ALLOWED}
    if target.type == "cuda":
        report["card"] = torch.cuda.get_device_name(target)
    equal = True
    for name in shapes.split(","):
        rows, differences = measure(name, target)
        report["shapes"][name] = {"steps": rows, "differences": differences}
        print(f"{name} on {report.get('card', target)}, {SHAPES[name][1]}")
        for row in rows:
            memory = "" if row["memory"] is None else f"{row['memory'] / 1e9:8.2f} GB"
            print(f"    {row['step']:<11}{row['seconds']:8.2f} s{memory}")
        for what, difference in differences.items():
            fine = difference <= ALLOWED[what]
            equal &= fine
            print(f"    {what:<11}{difference:8.1e} of {ALLOWED[what]:.0e} allowed{'' if fine else ': TOO FAR'}")
        print(end="", flush=True)
    measuring.finish(
        out, {**report, "facts": FACTS, "tokens": TOKENS, **measuring.machine(torch.get_num_threads(), load)}, equal
    )


if __name__ == "__main__":
    main()
