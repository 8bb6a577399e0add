"""Measure seconds per fact against the number of facts, beside the least that arithmetic allows on this machine.

    python evaluations/benchmarks/scaling.py [--model smollm2|gpt2] [--counts 1,10,100] [--out FILE.json]
        [--plot FILE.png]

Three stages of an edit with the default settings: keys (k* of every fact in every context), values (δ, in as many
steps as each takes), and scoring (every prompt of `ffedit.evaluate`, and free generation). `smollm2` takes the facts of
`evaluations/data/smollm2-thousand.json` at layer 8; `gpt2` is GPT-2 124M in shape with random weights, and random facts
of the same lengths at layer 4, whose values take eight steps each, since a random model may not reach the object.

    seconds    of the stage, per fact
    needed     multiply-accumulates of matrix products that the stage needs, per fact (`Needed`)
    ceiling    needed / the speed of a float32 product [4096, 1024] × [1024, 1024] before and after
    share      ceiling / seconds; meaningless while other processes load the machine
    plain      seconds of the procedure of the known tools, as a plain loop over the first facts in the same run
               (`--plain`): whole passes of the whole model over all texts of a fact, or over single texts for scoring;
               it scores less: the metrics of CounterFact, and no continuations beyond the objects' tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import measuring
import torch
from editing import theirs
from reference_scores import PlainScores
from transformers import GPT2Config

import ffedit
from ffedit.display.figures.saving import save_figure
from ffedit.editor.config import EditConfig
from ffedit.editor.key import PromptSet, build_prompts, read_keys
from ffedit.editor.value import Value, choose_values
from ffedit.evaluator import Evaluation
from ffedit.evaluator.generations import Generations
from ffedit.facts.fact import Fact, by_subject
from ffedit.model.hooks import capture
from ffedit.model.tokenization import pad

DATA = Path(__file__).parents[1] / "data" / "smollm2-thousand.json"
LAYERS, SEED = {"smollm2": 8, "gpt2": 4}, 0
WORDS, STEPS = 400, 8
STAGES = ("keys", "values", "scoring")


@dataclass(frozen=True)
class Needed:
    """Least multiply-accumulates with the matrices of a model that its stages need.

    A token costs the entries of a layer's matrices in each layer that it passes, and a prediction those of the
    unembedding; a backward pass, with gradients of states and none of weights, costs as much as the forward pass.
    Products of queries with keys and of their weights with values are neglected.
    """

    editable: ffedit.Editable
    layer: int

    def __post_init__(self) -> None:
        layers, vocabulary = measuring.matrix_entries(self.editable)
        last = self.editable.last_feed_forward
        assert last is not None
        ends = sum(p.numel() for p in last.parameters() if p.ndim == 2)
        through, above = sum(layers[: self.layer + 1]), sum(layers[self.layer + 1 :])
        object.__setattr__(self, "costs", (through, above, ends, vocabulary, sum(layers)))

    def keys(self, prompt_sets: Sequence[PromptSet]) -> int:
        """Count each distinct beginning of a text once, up to its subject, through the layers up to the edited one."""
        texts = [text for prompt_set in prompt_sets for text in prompt_set.texts]
        return len({text.ids[:end] for text in texts for end in range(1, text.site + 2)}) * self.costs[0]

    def values(self, prompt_sets: Sequence[PromptSet], values: Sequence[Value]) -> int:
        """Count each distinct beginning once; in each step the layers above, from the subject on, forward and back.

        The last feed-forward layer and the unembedding are needed only where a prediction is read. After the last step
        there is one more forward pass, to measure it.
        """
        _, above, last, vocabulary, whole = self.costs
        needed, beginnings = 0, set()
        for prompt_set, value in zip(prompt_sets, values, strict=True):
            texts, steps = prompt_set.texts, len(value.losses) - 1
            ends = [len(text.ids) - bool(text.target_ids) for text in texts]
            after = sum(end - text.site for end, text in zip(ends, texts, strict=True))
            reads = sum(max(1, len(text.target_ids)) for text in texts)
            beginnings |= {text.ids[: i + 1] for end, text in zip(ends, texts, strict=True) for i in range(end)}
            step = after * (above - last) + reads * (last + vocabulary)
            needed += len(prompt_set.essence) * vocabulary + (2 * steps + 1) * step
        return needed + len(beginnings) * whole

    def scoring(self, evaluation: Evaluation, generated: int) -> int:
        """Count each distinct beginning of a text once, and a prediction wherever an answer's token follows.

        Each of the `generated` tokens, which the answers' predictions do not give, is run and predicted, too.
        """
        *_, vocabulary, whole = self.costs
        texts = {text for questions in evaluation._questions.values() for text in questions.texts}
        beginnings = {text.ids[:end] for text in texts for end in range(1, len(text.ids))}
        reads = {text.ids[:end] for text in texts for end in range(text.answer, len(text.ids))}
        return (len(beginnings) + generated) * whole + (len(reads) + generated) * vocabulary


def random_facts(count: int) -> list[Fact]:
    """Return facts of random words, as long as SmolLM2's on average: four tokens of subject, ten of a prompt."""
    generator = torch.Generator().manual_seed(SEED)

    def words(many: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(WORDS, (many,), generator=generator).tolist())

    return [
        Fact(
            subject=(subject := words(4)),
            prompt=f"{words(2)} {{}} {words(4)}",
            target=words(2),
            previous=words(2),
            paraphrases=tuple(f"{words(2)} {subject} {words(4)}" for _ in range(2)),
            neighbors=tuple(words(10) for _ in range(4)),
        )
        for _ in range(count)
    ]


@contextmanager
def counted_generation() -> Iterator[list[int]]:
    """Count for each prompt the generated tokens that the scored answers do not already predict."""
    counts: list[int] = []
    begin = Generations._begin

    def counting(self: Generations, prompt: tuple[int, ...]) -> int:
        count = begin(self, prompt)
        counts.append(max(0, count - len(self._said[prompt])))
        return count

    with patch.object(Generations, "_begin", counting):
        yield counts


def stages(editable: ffedit.Editable, facts: Sequence[Fact], layer: int, config: EditConfig) -> dict[str, Any]:
    """Time the stages on `facts`, and count what each needs."""
    ff, needed = editable.feed_forward[layer], Needed(editable, layer)
    prompt_sets = build_prompts(editable, by_subject(facts), config)
    key_seconds, keys = measuring.timed(lambda: read_keys(editable, ff, prompt_sets))
    value_seconds, values = measuring.timed(lambda: choose_values(editable, ff, prompt_sets, keys, config.value))
    evaluation = Evaluation(editable, facts)
    with counted_generation() as generated:
        score_seconds, _ = measuring.timed(evaluation.scores)
    seconds = (key_seconds, value_seconds, score_seconds)
    products = (
        needed.keys(prompt_sets),
        needed.values(prompt_sets, values),
        needed.scoring(evaluation, sum(generated)),
    )
    return {
        name: {"seconds": passed / len(facts), "needed": count / len(facts)}
        for name, passed, count in zip(STAGES, seconds, products, strict=True)
    }


@torch.no_grad()
def plain_key(editable: ffedit.Editable, layer: int, prompt_set: PromptSet) -> torch.Tensor:
    """Return k* of one subject: its texts run in one batch through the whole model."""
    texts = prompt_set.prompts
    with capture({0: editable.memories[layer].module}, inputs=True) as entering:
        editable.model(input_ids=pad([text.ids for text in texts]), use_cache=False)
    return entering[0][range(len(texts)), [text.site for text in texts]].mean(0)


def plain(editable: ffedit.Editable, facts: Sequence[Fact], layer: int, config: EditConfig) -> dict[str, float]:
    """Return the seconds per fact of the plain loops, after a warm-up with the first fact's key."""
    prompt_sets = build_prompts(editable, by_subject(facts), config)
    plain_key(editable, layer, prompt_sets[0])
    loops: dict[str, Callable[[], Any]] = {
        "keys": lambda: [plain_key(editable, layer, texts) for texts in prompt_sets],
        "values": lambda: [theirs(editable, texts, config.value, layer) for texts in prompt_sets],
        "scoring": lambda: [PlainScores(editable.model, editable.tokenizer, [fact]).all() for fact in facts],
    }
    return {name: measuring.timed(loop)[0] / len(facts) for name, loop in loops.items()}


def measure(
    model: str, counts: Sequence[int], plain_count: int, progress: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure each number of facts, after a warm-up with two, and the plain loops on the first `plain_count`."""
    config = EditConfig()
    if model == "gpt2":
        editable, facts = measuring.random_gpt2(GPT2Config(), WORDS, SEED), random_facts(max(counts))
        config = replace(config, value=replace(config.value, steps=STEPS, target_probability=2.0))
    else:
        editable = ffedit.load(model)
        facts = [fact for fact in ffedit.read_facts(DATA) if fact.previous][: max(counts)]
    layer = LAYERS[model]
    stages(editable, facts[:2], layer, config)
    loops = plain(editable, facts[:plain_count], layer, config) if plain_count else {}
    rows = []
    for count in counts:
        before = measuring.matmul_speed()
        measured = stages(editable, facts[:count], layer, config)
        speed = median([before, measuring.matmul_speed()])
        for name, stage in measured.items():
            stage["plain"] = loops.get(name)
            stage["ceiling"] = stage["needed"] / speed
            stage["share"] = stage["ceiling"] / stage["seconds"]
        rows.append({"facts": count, "matmul_per_second": speed, **measured})
        progress(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print the lines of one number of facts."""
    print(f"{row['facts']} facts, large products at {2e-9 * row['matmul_per_second']:.0f} GFLOP/s")
    for name in STAGES:
        stage = row[name]
        beside = "" if stage["plain"] is None else f", plain loop {stage['plain']:.3f}"
        print(
            f"    {name:8} {stage['seconds']:.4f} s a fact, ceiling {stage['ceiling']:.4f}, share "
            f"{stage['share']:.0%}{beside}"
        )
    print(end="", flush=True)


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw seconds and ceiling of each stage against the number of facts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    counts = [row["facts"] for row in rows]
    for name, colour in zip(STAGES, ("#009e73", "#0072b2", "#d55e00"), strict=True):
        axes.plot(counts, [row[name]["seconds"] for row in rows], "o-", color=colour, label=name)
        axes.plot(counts, [row[name]["ceiling"] for row in rows], ":", color=colour, label=f"{name}, ceiling")
        if (loop := rows[0][name]["plain"]) is not None:
            axes.axhline(loop, color=colour, linestyle="--", linewidth=0.8, label=f"{name}, plain loop")
    axes.set(xscale="log", yscale="log", xlabel="facts", ylabel="seconds per fact", title=title)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


@click.command(help=__doc__)
@click.option("--model", type=click.Choice(list(LAYERS)), default="smollm2", show_default=True)
@click.option("--counts", default="1,10,100", show_default=True, help="Numbers of facts; 1000 takes half an hour.")
@click.option("--plain", "plain_count", type=click.IntRange(min=0), default=3, show_default=True, help="Facts, or 0.")
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="The curve.")
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads, help="Default: torch's own.")
def main(model: str, counts: str, plain_count: int, out: Path | None, plot: Path | None, threads: int) -> None:
    """Measure, show, and write."""
    load = measuring.load_before(threads)
    torch.set_num_threads(threads)
    rows = measure(model, [int(count) for count in counts.split(",")], plain_count, show)
    report = {"model": model, "layer": LAYERS[model], "rows": rows, "seed": SEED, **measuring.machine(threads, load)}
    measuring.finish(out, report, True)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        save_figure(plot, lambda: draw(rows, f"{model}, layer {LAYERS[model]}, {threads} threads"))


if __name__ == "__main__":
    main()
