"""Time causal tracing against the published loop, against arithmetic, and against the machine.

    python evaluations/benchmarks/tracing.py [--out FILE.json] [--rounds N] [--threads N] [--plot FILE.png]
    [--quick | --full]

`ffedit.locate` and `reference.trace` run in one process, by turns, on the same facts, with the same noise, samples,
threads and precision (float32), after a warm-up. For each setting:

    ratio      seconds of the reference / seconds of ffedit; median over the rounds, with the smallest and largest
    ceiling    multiply-accumulates of the reference / those that exact tracing needs (`reference.products`)
    reached    ratio / ceiling
    matmul     speed of ffedit's needed products, as a share of the measured speed of a float32 matrix product
    memory     peak resident memory above that of the loaded model, each in a fresh process; and of the whole processes
    equal      largest absolute difference of the effects, and the same as a share of the largest effect

All passes of the reference are alike: one pass of the whole model. Unless `--full`, it restores only some pairs of
layer and token, drawn once by seed, and its seconds are scaled by the number of passes; equality is judged on those
pairs. ffedit also skips the last feed-forward layer where nothing reads it, although the needed products count it, so
that it can exceed the ceiling. Its further work (σ of the noise in every call; with windows, each layer alone at the
subject's last token) is in its seconds, but neither in the reference's nor in the needed products.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import measuring
import numpy as np
import reference
import torch
from transformers import GPT2Config

import ffedit
from ffedit.display.figures.saving import save_figure
from ffedit.facts.formats import parse_record
from ffedit.model.tokenization import Encoded, encode

DATA = Path(__file__).parents[1] / "data" / "atlas-counterfact.json"
SAMPLES, SEED, FIRST, LAST = 10, 0, 3, 6
# Effects agree if they differ by less than TOLERANCE, and by less than RELATIVE of the largest one: a random model
# gives its answer so little probability that anything would pass TOLERANCE alone.
TOLERANCE, RELATIVE = 1e-5, 1e-2
# Pairs of layer and token that the reference restores for each fact (GPT-2, Atlas), by `quick`; --full restores all.
PAIRS = {False: (36, 6), True: (7, 2)}


@dataclass(frozen=True)
class Setting:
    """A model and a kind of trace.

    Attributes:
        name: one letter.
        title: description.
        model: "gpt2", with random weights, or "atlas".
        kind: kind of the restored outputs.
    """

    name: str
    title: str
    model: str
    kind: reference.Kind

    def load(self, quick: bool) -> tuple[ffedit.Editable, list[ffedit.Fact]]:
        """Return the model and the facts."""
        if self.model == "gpt2":
            return random_gpt2(GPT2Config(), 12)
        records = [r for r in json.loads(DATA.read_text(encoding="utf-8")) if r["split"] == "reporting"]
        return ffedit.load("atlas", device="cpu"), [parse_record(r) for r in records[: 20 if quick else 100]]

    def pairs(self, quick: bool, full: bool) -> int | None:
        """Return the number of restorations of the reference for each fact; None for all."""
        return None if full else PAIRS[quick][self.model == "atlas"]


SETTINGS = (
    Setting("a", "GPT-2 124M, states", "gpt2", "state"),
    Setting("b", "GPT-2 124M, feed-forward windows", "gpt2", "feed_forward"),
    Setting("c", "GPT-2 124M, attention windows", "gpt2", "attention"),
    Setting("d", "Atlas, many facts, states", "atlas", "state"),
)


def random_gpt2(config: GPT2Config, length: int) -> tuple[ffedit.Editable, list[ffedit.Fact]]:
    """Return a random GPT-2, and a prompt of `length` tokens, its subject at tokens 3 … 6, its answer one token."""
    words = [f"w{i}" for i in range(length + 1)]
    prompt = " ".join([*words[:FIRST], "{}", *words[LAST + 1 : length]])
    fact = ffedit.Fact(" ".join(words[FIRST : LAST + 1]), prompt, None, words[length])
    return measuring.random_gpt2(config, length + 1, SEED), [fact]


def encoded(editable: ffedit.Editable, facts: Sequence[ffedit.Fact]) -> list[Encoded]:
    """Return the facts' prompts with their previous objects, encoded as in `ffedit.locate`."""
    return [encode(editable.tokenizer, f.text, f.previous or "", f.span, editable.max_tokens) for f in facts]


class Opponents:
    """Both sides of one comparison: the same facts, the same noise."""

    def __init__(
        self,
        editable: ffedit.Editable,
        facts: Sequence[ffedit.Fact],
        kind: reference.Kind,
        samples: int = SAMPLES,
        pairs: int | None = None,
    ) -> None:
        self.editable, self.facts, self.kind, self.samples = editable, list(facts), kind, samples
        self.texts = encoded(editable, facts)
        self.sigma = reference.noise_level(editable)
        self.window = self.ours(1).traces[0].window  # ffedit's default; this call warms up
        rng = random.Random(SEED)
        every = [[(layer, i) for i in range(t.answer) for layer in range(len(editable.layers))] for t in self.texts]
        self.pairs = [choices if pairs is None else rng.sample(choices, min(pairs, len(choices))) for choices in every]
        self.scale = sum(len(choices) + 1 for choices in every) / sum(len(run) + 1 for run in self.pairs)
        self.theirs(1)

    def ours(self, samples: int | None = None) -> ffedit.TraceSet:
        """Return ffedit's traces, of all facts in one call."""
        return ffedit.locate_all(self.editable, self.facts, self.kind, samples=samples or self.samples, seed=SEED)

    def theirs(self, only: int | None = None) -> list[reference.Traced]:
        """Return the reference's traces, fact by fact; with `only`, one restoration for each of so many facts."""
        return [
            reference.trace(
                self.editable,
                text.ids,
                text.subject or (0, 0),
                text.answer,
                self.kind,
                sigma=self.sigma,
                window=self.window,
                samples=self.samples,
                seed=SEED,
                pairs=pairs if only is None else pairs[:1],
            )
            for text, pairs in zip(self.texts[:only], self.pairs, strict=False)
        ]

    def products(self) -> tuple[int, int]:
        """Return the multiply-accumulates of the reference and those needed, over all facts."""
        counts = [reference.products(self.editable, text, self.kind, self.window, self.samples) for text in self.texts]
        return sum(published for published, _ in counts), sum(needed for _, needed in counts)

    def rounds(self, count: int) -> tuple[list[float], list[float], dict[str, float]]:
        """Return both sides' seconds by round, the reference's scaled to all its passes, and their differences."""
        sides = {"ffedit": lambda _: self.ours(), "reference": lambda _: self.theirs()}
        seconds, results = measuring.rounds(sides, count)
        theirs = [passed * self.scale for passed in seconds["reference"]]
        return seconds["ffedit"], theirs, _differences(results["ffedit"][-1].traces, results["reference"][-1])


def _differences(ours: Iterable[ffedit.Trace], theirs: Iterable[reference.Traced]) -> dict[str, float]:
    """Return the largest differences of effects and of clean or corrupted probabilities, and the largest effect."""
    differences, sizes, levels = [], [], []
    for trace, plain in zip(ours, theirs, strict=True):
        asked = ~np.isnan(plain.effects)
        differences.append(float(np.abs(trace.effects - plain.effects)[asked].max()))
        sizes.append(float(np.abs(plain.effects[asked]).max()))
        levels += [abs(trace.clean - plain.clean), abs(trace.corrupted - plain.corrupted)]
    return {"difference": max(differences), "largest_effect": max(sizes), "level_difference": max(levels)}


def peak_memory(side: str, setting: Setting, threads: int, quick: bool) -> tuple[int, int]:
    """Return the bytes of this process with the model loaded, and its peak while "ffedit" or the "reference" traces.

    The reference restores only twice, because every pass has the same peak.
    """
    torch.set_num_threads(threads)
    editable, facts = setting.load(quick)
    texts = encoded(editable, facts)
    # A pass of two tokens loads what libraries load late.
    reference.trace(editable, texts[0].ids[:2], (0, 1), 1, "state", sigma=1.0, samples=1, pairs=[(0, 0)])
    baseline = measuring.forget_peak()
    if side == "ffedit":
        ffedit.locate_all(editable, facts, setting.kind, samples=SAMPLES, seed=SEED)
    else:
        longest = max(texts, key=lambda text: len(text.ids))
        assert longest.subject is not None
        pairs = [(0, longest.subject[0]), (len(editable.layers) - 1, longest.answer - 1)]
        few = {"sigma": 1.0, "window": 3, "samples": SAMPLES, "pairs": pairs}
        reference.trace(editable, longest.ids, longest.subject, longest.answer, setting.kind, **few)  # type: ignore[arg-type]
    return baseline, measuring.peak()


def compare(setting: Setting, rounds: int, quick: bool, full: bool) -> dict[str, Any]:
    """Time one setting and compare it with the two limits."""
    editable, facts = setting.load(quick)
    opponents = Opponents(editable, facts, setting.kind, pairs=setting.pairs(quick, full))
    before = measuring.matmul_speed()
    ours, theirs, differences = opponents.rounds(rounds)
    speed = median([before, measuring.matmul_speed()])
    return {
        **asdict(setting),
        "facts": len(facts),
        "samples": SAMPLES,
        "window": opponents.window,
        "restored_by_reference": sum(map(len, opponents.pairs)),
        "scaled_by": opponents.scale,
        **measuring.held(ours, theirs, *opponents.products(), speed),
        "equal": differences["difference"] <= min(TOLERANCE, RELATIVE * differences["largest_effect"]),
        **differences,
    }


def scaling(quick: bool) -> dict[str, list[dict[str, float]]]:
    """Return both sides' seconds against layers, tokens and samples, for states in random GPT-2 shapes of width 256."""
    standard = {"layers": 6, "tokens": 12, "samples": SAMPLES}
    steps = {"layers": (2, 4, 8, 16), "tokens": (8, 16, 32, 64), "samples": (1, 4, 16, 64)}
    curves: dict[str, list[dict[str, float]]] = {}
    for name, values in steps.items():
        for value in values[:3] if quick else values:
            now = {**standard, name: value}
            shape: dict[str, Any] = {"n_positions": 128, "n_embd": 256, "n_head": 4, "n_layer": now["layers"]}
            config = GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=0, **shape)
            opponents = Opponents(*random_gpt2(config, now["tokens"]), "state", now["samples"], pairs=7)
            ours, theirs, _ = opponents.rounds(1 if quick else 3)
            published, needed = opponents.products()
            point = {name: value, "ffedit": median(ours), "reference": median(theirs), "ceiling": published / needed}
            curves.setdefault(name, []).append(point)
    return curves


def show(row: dict[str, Any]) -> None:
    """Print the lines of one setting."""
    scaled = "" if row["scaled_by"] == 1 else f", scaled ×{row['scaled_by']:.1f}"
    facts = "1 fact" if row["facts"] == 1 else f"{row['facts']} facts"
    print(f"({row['name']}) {row['title']}; {facts}, {row['samples']} samples, window {row['window']}")
    print(
        f"    seconds   ffedit {median(row['seconds']['ffedit']):.2f}, reference "
        f"{median(row['seconds']['reference']):.2f} ({row['restored_by_reference']} restorations run{scaled})"
    )
    measuring.show_held(row)
    if "memory" in row:
        measuring.show_memory(row["memory"])
    print(
        f"    equal     {'yes' if row['equal'] else 'NO'}: effects differ by {row['difference']:.1e} at most, "
        f"{row['difference'] / row['largest_effect']:.1e} of the largest",
        flush=True,
    )


def draw(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> Any:
    """Draw seconds against sizes: one panel for each size, both axes logarithmic, one vertical scale.

    `curves` has points by size; each has the size's value under its name, "ffedit", "reference" and "ceiling".
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.0), layout="constrained")
    (panels,) = figure.subplots(1, len(curves), sharey=True, squeeze=False)
    for panel, (name, points) in zip(panels, curves.items(), strict=True):
        values = [point[name] for point in points]
        floors = [point["reference"] / point["ceiling"] for point in points]
        panel.plot(values, [p["reference"] for p in points], "s-", color="#d55e00", label="published loop")
        panel.plot(values, [p["ffedit"] for p in points], "o-", color="#0072b2", label="ffedit")
        panel.plot(values, floors, ":", color="#000000", label="published loop / ceiling")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.set_xlabel({"tokens": "tokens of the prompt", "samples": "corrupted samples"}.get(name, name))
        panel.grid(alpha=0.3, which="major")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds per trace of states")
    panels[0].legend(frameon=False, fontsize="small")
    return figure


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--rounds", type=click.IntRange(min=1), help="Default 5; 1 with --quick.")
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads, help="Default: torch's own.")
@click.option("--plot", type=click.Path(path_type=Path), help="Scaling with layers, tokens and samples, as a figure.")
@click.option("--only", multiple=True, type=click.Choice([s.name for s in SETTINGS]), help="Only these settings.")
@click.option("--quick", is_flag=True, help="About a minute: one round, 20 facts, memory of the first setting only.")
@click.option("--full", is_flag=True, help="Every restoration of the reference, nothing scaled.")
def main(
    out: Path | None,
    rounds: int | None,
    threads: int,
    plot: Path | None,
    only: tuple[str, ...],
    quick: bool,
    full: bool,
) -> None:
    """Time tracing against the published loop; exits with 1 where the effects are not equal."""
    if quick and full:
        raise click.UsageError("--quick and --full exclude each other")
    rounds = rounds or (1 if quick else 5)
    load = measuring.load_before(threads)
    settings = [s for s in SETTINGS if not only or s.name in only]
    # Before anything is loaded here, so that both sides find the machine equally free.
    peaks = {s.name: measuring.memory(peak_memory, s, threads, quick) for s in (settings[:1] if quick else settings)}
    torch.set_num_threads(threads)
    rows = []
    for setting in settings:
        row = compare(setting, rounds, quick, full)
        if setting.name in peaks:
            row["memory"] = peaks[setting.name]
        rows.append(row)
        show(row)
    curves = {}
    if plot:
        curves = scaling(quick)
        plot.parent.mkdir(parents=True, exist_ok=True)
        save_figure(plot, lambda: draw(curves))
    report = {
        "settings": rows,
        "scaling": curves,
        "rounds": rounds,
        "quick": quick,
        "full": full,
        "tolerance": {"absolute": TOLERANCE, "of_the_largest": RELATIVE},
        "seeds": {"weights": SEED, "noise": SEED, "pairs": SEED},
        **measuring.machine(threads, load),
    }
    measuring.finish(out, report, all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
