"""Time the choice of v* against the published procedure, against arithmetic, and against the machine.

    python evaluations/benchmarks/editing.py [--out FILE.json] [--rounds N] [--threads N] [--facts N] [--quick]

GPT-2 124M in shape, with random weights, float32. A fact is a prompt of 12 tokens, its subject at tokens 3 to 6 counted
from 0 (δ is added at token 6), its new object one token; it stands bare and after each of 10 contexts of 10 tokens,
which all facts share. One essence prompt of 6 tokens, its subject at tokens 0 to 3. Both sides take the same 20 steps
at layer 4, with ffedit's other defaults; no value ends early, whatever probability it reaches.

`reference_value.plain_value` takes one fact at a time; ffedit takes one fact, and all facts as one batch. They run in
one process, by turns, after a warm-up; in each round the single fact is another one. All seconds include k* and v*.

    ratio      seconds per fact of the reference / of ffedit; median over the rounds, with the smallest and largest
    ceiling    multiply-accumulates of the reference / those that the task needs (`products`), the same for a batch
    reached    ratio / ceiling
    matmul     speed of ffedit's needed products, as a share of the measured speed of a float32 matrix product
    memory     peak resident memory above that of the loaded model, each in a fresh process; and of the whole processes
    equal      largest ‖v* − v*'‖ / ‖δ'‖ over the facts that the reference took; v*' and δ' are the reference's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import measuring
import torch
from reference_value import PlainValue, Text, plain_value
from torch import Tensor
from transformers import GPT2Config

import ffedit
from ffedit.editor.config import ValueConfig
from ffedit.editor.key import PromptSet, read_keys
from ffedit.editor.value import choose_values
from ffedit.model.tokenization import Encoded

LAYER, SEED = 4, 0
CONTEXTS, CONTEXT, PROMPT, SUBJECT, ESSENCE = 10, 10, 12, (3, 7), 6
CONFIG = ValueConfig(steps=20, target_probability=2.0)
# Two float32 paths through 20 steps, of which each divides the gradient by its length.
TOLERANCE = 1e-3


# Everything that depends on the editor's interface is here.
def ours(editable: ffedit.Editable, prompt_sets: Sequence[PromptSet], config: ValueConfig) -> list[Tensor]:
    """Return v* of each of `prompt_sets`, as in `ffedit.edit`: k* first, then all values together."""
    layer = editable.feed_forward[LAYER]
    keys = read_keys(editable, layer, prompt_sets)
    return [value.v for value in choose_values(editable, layer, prompt_sets, keys, config)]


def theirs(editable: ffedit.Editable, prompt_set: PromptSet, config: ValueConfig, layer: int = LAYER) -> PlainValue:
    """Return the reference's v* for the same texts and settings."""
    memory = editable.memories[layer]
    return plain_value(
        editable.model,
        editable.layers[layer],
        memory.module,
        memory.value,
        [Text(text.ids, text.answer, text.subject_last) for text in prompt_set.prompts],
        [Text(text.ids, text.answer, text.subject_last) for text in prompt_set.essence],
        optimizer=config.optimizer,
        steps=config.steps,
        step_size=config.step_size,
        max_delta_norm=config.max_delta_norm,
        weight_decay=config.weight_decay,
        kl_weight=config.kl_weight,
        penalty_decay=config.penalty_decay,
        target_probability=config.target_probability,
        target_loss=config.target_loss,
    )


def worded(vocabulary: int, facts: int) -> list[PromptSet]:
    """Return the texts of random facts."""
    generator = torch.Generator().manual_seed(SEED)

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

    contexts = [(), *(drawn(CONTEXT) for _ in range(CONTEXTS))]
    prompt_sets = []
    for _ in range(facts):
        prompt, answer = drawn(PROMPT), drawn(1)
        first, last = SUBJECT
        subject = prompt[first:last]
        prompts = tuple(
            Encoded("", context + prompt + answer, len(context) + PROMPT, (len(context) + first, len(context) + last))
            for context in contexts
        )
        essence = Encoded("", subject + drawn(ESSENCE - len(subject)), ESSENCE, (0, len(subject)))
        prompt_sets.append(PromptSet(prompts, (0,) * len(prompts), (essence,), ()))
    return prompt_sets


def products(editable: ffedit.Editable, prompt_set: PromptSet, steps: int) -> tuple[int, int]:
    """Return the multiply-accumulates of the reference and those that the task needs, for one fact.

    A token costs the entries of a layer's matrices in each layer that it passes, and the unembedding's entries once for
    its logits; backward, where a gradient for the states but none for the weights is wanted, as much again. The
    products of queries with keys and of their weights with values are neglected (below 1 % at these lengths).

    The reference: one pass of all texts, padded, all layers, all logits; then for each step the same, and back again
    as far as the layer; and once more forward, to measure the last step.
    The task: one pass of all texts, unpadded, without the answer's last token, with logits for the essence only; then
    for each step, forward and back, the layers above and the tokens from the subject's last one on, with the last
    feed-forward layer and the logits for the answer and the essence only; and once more forward.
    """
    layers, vocabulary = measuring.matrix_entries(editable)
    assert editable.last_feed_forward is not None
    last = sum(p.numel() for p in editable.last_feed_forward.parameters() if p.ndim == 2)
    above = sum(layers[LAYER + 1 :])
    texts = [*prompt_set.prompts, *prompt_set.essence]
    padded = len(texts) * max(len(text.ids) for text in texts)
    whole = padded * (sum(layers) + vocabulary)
    published = whole + steps * (whole + padded * (above + vocabulary)) + whole
    ends = [len(text.ids) - bool(text.target_ids) for text in texts]
    after = sum(end - text.subject_last for end, text in zip(ends, texts, strict=True))
    essence_count = len(prompt_set.essence)
    read_at = essence_count + sum(len(text.target_ids) for text in texts)
    step = after * (above - last) + read_at * (last + vocabulary)
    needed = sum(ends) * sum(layers) + essence_count * vocabulary + (2 * steps + 1) * step
    return published, needed


def peak_memory(side: str, facts: int, threads: int) -> tuple[int, int]:
    """Return the bytes of this process with the model loaded, and its peak while "ffedit" or the "reference" works.

    The reference takes one fact, ffedit all as a batch. Two steps are enough, because the peak is that of any step.
    """
    torch.set_num_threads(threads)
    editable = measuring.random_gpt2(GPT2Config(), 12, SEED)
    prompt_sets = worded(editable.model.config.vocab_size, facts)
    # A forward and backward pass of two tokens loads what libraries load late.
    states = torch.randn(1, 2, int(editable.memories[0].value.shape[0]), requires_grad=True)
    torch.autograd.grad(editable.model(inputs_embeds=states, use_cache=False).logits.sum(), states)
    baseline = measuring.forget_peak()
    few = replace(CONFIG, steps=2)
    if side == "ffedit":
        ours(editable, prompt_sets, few)
    else:
        theirs(editable, prompt_sets[0], few)
    return baseline, measuring.peak()


def compare(facts: int, rounds: int, config: ValueConfig) -> list[dict[str, Any]]:
    """Time one fact and a batch, and compare both with the two limits."""
    editable = measuring.random_gpt2(GPT2Config(), 12, SEED)
    prompt_sets = worded(editable.model.config.vocab_size, facts)
    sides = {
        "reference": lambda number: theirs(editable, prompt_sets[number % facts], config),
        "one": lambda number: ours(editable, [prompt_sets[number % facts]], config),
        "batch": lambda _: ours(editable, prompt_sets, config),
    }
    warm = replace(config, steps=1)
    theirs(editable, prompt_sets[0], warm)
    ours(editable, prompt_sets[:2], warm)
    before = measuring.matmul_speed()
    seconds, results = measuring.rounds(sides, rounds)
    speed = median([before, measuring.matmul_speed()])
    counted, references = products(editable, prompt_sets[0], config.steps), results["reference"]
    rows = []
    for side, size in (("one", 1), ("batch", facts)):
        per_fact = [passed / size for passed in seconds[side]]
        values = [v[number % size] for number, v in enumerate(results[side])]
        differences = [float((v.cpu() - p.v).norm() / p.delta.norm()) for v, p in zip(values, references, strict=True)]
        row = {"name": side, "facts": size, "steps": config.steps, "texts": len(prompt_sets[0].prompts) + 1}
        row |= measuring.held(per_fact, seconds["reference"], *counted, speed)
        rows.append({**row, "equal": max(differences) <= TOLERANCE, "difference": max(differences)})
    return rows


def show(row: dict[str, Any]) -> None:
    """Print the lines of one side."""
    facts = "one fact" if row["facts"] == 1 else f"{row['facts']} facts as a batch"
    ours, theirs = (median(row["seconds"][side]) for side in ("ffedit", "reference"))
    print(f"{facts}; {row['steps']} steps, {row['texts']} texts each")
    print(f"    seconds   ffedit {ours:.2f}, reference {theirs:.2f} per fact")
    measuring.show_held(row)
    measuring.show_memory(row["memory"])
    word = "yes" if row["equal"] else "NO"
    print(f"    equal     {word}: v* differs by {row['difference']:.1e} of ‖δ‖ at most", flush=True)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--rounds", type=click.IntRange(min=1), help="Default 5; 1 with --quick.")
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads, help="Default: torch's own.")
@click.option("--facts", type=click.IntRange(min=2), help="In the batch. Default 50; 4 with --quick.")
@click.option("--quick", is_flag=True, help="About a minute: one round, a small batch, 4 steps.")
def main(out: Path | None, rounds: int | None, threads: int, facts: int | None, quick: bool) -> None:
    """Time the choice of v* against the published procedure; exits with 1 where the values are not equal."""
    rounds, facts = rounds or (1 if quick else 5), facts or (4 if quick else 50)
    config = replace(CONFIG, steps=4) if quick else CONFIG
    load = measuring.load_before(threads)
    # Before anything is loaded here, so that both sides find the machine equally free.
    peaks = {size: measuring.memory(peak_memory, size, threads) for size in (1, facts)}
    torch.set_num_threads(threads)
    rows = [{**row, "memory": peaks[row["facts"]]} for row in compare(facts, rounds, config)]
    for row in rows:
        show(row)
    report = {
        "settings": rows,
        "rounds": rounds,
        "quick": quick,
        "layer": LAYER,
        "tokens": {"prompt": PROMPT, "context": CONTEXT, "essence": ESSENCE, "subject": SUBJECT},
        "tolerance": TOLERANCE,
        "seeds": {"weights": SEED, "texts": SEED},
        **measuring.machine(threads, load),
    }
    measuring.finish(out, report, all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
