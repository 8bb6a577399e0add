"""Everything that a person does with a model, on the CPU and on a device without float64.

`python whole_line.py FAMILY FOLDER [FIRST-END ...]` prints, as a line of JSON, how much each step differs on
the two, relative to their size; for each range of layers, it does so of a model that has these layers on the device.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from second_device import SecondDevice, moved, spread
from writing import CORPUS, FACT, SECOND as OTHER, quick

import ffedit
from ffedit import Edit, Editable
from ffedit.editor.methods import METHODS
from ffedit.editor.write import write as write_facts
from ffedit.inference import precision

FACTS = [dataclasses.replace(FACT, paraphrases=("{} stands in",)), OTHER]
PROMPT = "the Eiffel tower is located in"


def of_edit(edit: Edit) -> list[Any]:
    """The numbers of an edit."""
    return [[update.dense, edit.keys.get(at), edit.values.get(at)] for at, update in edit.updates.items()]


def steps(editable: Editable, folder: Path) -> Iterator[tuple[str, Any]]:
    """Each step's name and numbers."""
    stats = ffedit.collect_stats(editable, [0, 1], corpus=CORPUS)
    yield "stats", [[moments.sum, moments.ridge] for moments in stats.values()]
    for kind in ("state", "feed_forward"):
        yield f"locate {kind}", ffedit.locate(editable, FACT, samples=2, kind=kind).effects
    for method in METHODS:
        layers = [0, 1] if method == "memit" else [1]
        edit = write_facts(editable, FACTS, method, layers, quick(steps=3, ft_steps=2), stats)
        yield method, of_edit(edit)
        report = ffedit.evaluate(editable, FACTS, edit, full=method == "memit")
        yield f"evaluate {method}", [report.before.to_dict(), report.after.to_dict()]
    first = write_facts(editable, FACTS[:1], "memit", [1], quick(steps=3), stats)
    first.apply_(editable)
    for method in ("alphaedit", "rome"):
        edit = write_facts(editable, FACTS[1:], method, [1], quick(steps=3), stats, preserve=[first])
        yield f"{method} after another", of_edit(edit)
    first.undo_(editable)
    memory = str(editable.memories[1].address) if 1 in editable.memories else "1.0"
    yield "inspect memory", ffedit.inspect_memory(editable, f"{memory}.5", corpus=CORPUS).to_dict()
    yield "inspect prompt", ffedit.inspect_prompt(editable, PROMPT).to_dict()
    yield "inspect edit", ffedit.inspect_edit(editable, first, corpus=CORPUS).to_dict()


def numbers(value: Any) -> list[float]:
    """All numbers in a value, in order."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [float(number) for number in value.flatten().tolist()]
    if isinstance(value, dict):
        return [number for name, item in value.items() if name not in ("seconds", "folder") for number in numbers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def main(family: str, folder: Path, splits: Sequence[range | None]) -> None:
    """Run all steps on the CPU, and for each split on the device or on both, and print how far they are apart."""
    torch.set_num_threads(1)
    precision.least_seconds = lambda *_: 1.0  # as `one_precision` of `conftest.py`
    plain = zoo.trained(family, True)
    # Of a model on both devices, the first steps show that each part finds its device.
    taken = partial(takewhile, lambda step: splits[0] is None or step[0] != "alphaedit")

    def found(name: str, model: Any) -> dict[str, list[float]]:
        os.environ["FFEDIT_CACHE"] = str(folder / f"cache-{name}")
        pair = model, plain.tokenizer
        return {step: numbers(value) for step, value in taken(steps(ffedit.load(pair), folder / name))}

    expected = found("cpu", copy.deepcopy(plain.model))
    for number, layers in enumerate(splits):
        with SecondDevice():
            model = moved(copy.deepcopy(plain.model)) if layers is None else spread(zoo.trained(family, True), layers)
            other = found(f"second-{number}", model)
        apart = {}
        for step, values in expected.items():
            one, two = (np.nan_to_num(np.array(side)) for side in (values, other[step]))
            difference = np.abs(one - two).max() / np.abs(one).max() if len(one) == len(two) else np.inf
            apart[step] = [len(one), float(difference)]
        sys.stdout.write(json.dumps(apart) + "\n")


if __name__ == "__main__":
    parts = [range(*map(int, part.split("-"))) for part in sys.argv[3:]]
    main(sys.argv[1], Path(sys.argv[2]), parts or [None])
