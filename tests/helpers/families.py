"""What ffedit does with each family, on its tiny model; `python tests/helpers/families.py` writes it down.

The tests of `test_families` hold the same measurements against what they should be, so docs/families.md says nothing
that is not tested. Nothing here is asked of a model's type: blocks are told by probing them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pictures
import pytest
import torch
import transformers
import zoo
from making import check_here
from shell import TEXT
from storing import BARE, missed_in_prompt
from torch import Tensor
from writing import FACT, PLAIN_KEY, quick, with_numbers

import ffedit
from ffedit import Edit, EditConfig, FFEditError, PromptConfig
from ffedit.editor.output_map import OutputMap, find_output_map
from ffedit.editor.write import write as write_facts
from ffedit.evaluator.responses import ask
from ffedit.inference.corpus import Corpus
from ffedit.model.editable import Editable
from ffedit.model.hooks import replace_input
from ffedit.model.tokenization import encode

# A square matrix is another shape of a family that is there.
FAMILIES = [name for name in (*zoo.FAMILIES, *zoo.MIXTURES, *zoo.HYBRIDS) if not name.endswith("_square")]
LAYER = 1
NEAR, TWICE = 1e-4, 2.0
DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
_PLACE = TemporaryDirectory(prefix="ffedit-families-")
# One process for all checkpoints: from_pretrained as anybody would call it, no ffedit.
REOPEN = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12)[None] * 7 % 97).logits
    print(json.dumps(logits.double().tolist()))
"""
IDS = torch.arange(12)[None] * 7 % 97


@contextmanager
def _apart() -> Iterator[Path]:
    """A place of its own for what is cached and written, and exports verified without a process each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFEDIT_CACHE", str(Path(_PLACE.name) / "cache"))
        patch.setattr("ffedit.exporter.exporting.check_fresh", check_here)
        yield Path(_PLACE.name)


# What a model is ----------------------------------------------------------------------------------


def _key(editable: Editable, layer: int) -> Tensor:
    """The key at the last token of a pass over a few tokens, [Σ d_ff]."""
    with editable.feed_forward[layer].keys() as keys, torch.no_grad():
        editable.model(input_ids=editable.probe_ids(), use_cache=False)
    return keys()[-1]


def parallel(editable: Editable) -> bool:
    """Whether the feed-forward layer does not see what its block learned from other tokens.

    By trial: its key at one token stays as it is when what the block receives at the token before is another.
    """

    def disturb(states: Tensor) -> Tensor:
        states = states.clone()
        states[:, -2] = states[:, -2].roll(1, -1)
        return states

    before = _key(editable, LAYER)
    with replace_input(editable.layers[LAYER], disturb):
        return torch.equal(before, _key(editable, LAYER))


def way_to_stream(family: str) -> OutputMap:
    """Return how the feed-forward output reaches the residual stream."""
    found = case(family)
    editable, ff = found.editable, found.editable.feed_forward[LAYER]
    text = encode(editable.tokenizer, FACT.text, span=FACT.span)
    with ff.keys() as keys, torch.no_grad():
        editable.model(input_ids=torch.tensor([text.ids]), use_cache=False)
    return find_output_map(editable, ff, text, ff.matrix @ keys()[text.site].double())


# What works ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What became of one fact in one family's model.

    Attributes:
        editable: the model, as it was.
        edit: the fact, written by ROME.
        missed: how much of what ROME asked for is missed in a real forward pass with the edit applied.
        took: how many times as likely as before the new object is in a model that knows the fact, trained a little,
            after ROME with the default numbers of a value.
        undone: the edit changed its matrices and nothing else, and undone it left the weights bit for bit.
        logits: of the edited model.
        checkpoint: the exported folder.
        adapter: why PEFT could not put the edit on the model; empty: it did, with the same logits.
        spread: why MEMIT could not spread the fact over two layers; empty: it did.
    """

    editable: Editable
    edit: Edit
    missed: float
    took: float
    undone: bool
    logits: Tensor
    checkpoint: Path
    adapter: str
    spread: str


def _told(act: Callable[[], object]) -> str:
    """What ffedit says when it refuses; nothing where it does not."""
    try:
        act()
    except FFEditError as error:
        return str(error)
    return ""


@cache
def case(family: str) -> Case:
    """One family's, made once."""
    with _apart() as place:
        base, corpus_file = place / family, place / "corpus.txt"
        editable = zoo.build(family)
        editable.model.save_pretrained(base)
        editable.tokenizer.save_pretrained(base)
        corpus_file.write_text(TEXT * 8)
        corpus = Corpus(corpus_file, 300)
        edit = write_facts(editable, [FACT], "rome", [LAYER], quick(**BARE), corpus)
        before, missing = zoo.snapshot(editable), missed_in_prompt(editable, edit, LAYER)
        edit.apply_(editable)
        after = zoo.snapshot(editable)
        with torch.no_grad():
            logits = editable.model(input_ids=IDS).logits.double()
        edit.undo_(editable)
        took = _took(family, corpus)
        parts = [editable.memories[at] for at in edit.updates]
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        undone = zoo.unchanged(editable, before) and changed == {f"{part.name}.{part.own}" for part in parts}
        checkpoint = ffedit.export(base, edit, place / f"{family}-edited").folder
        adapter = _told(lambda: ffedit.export(base, edit, place / f"{family}-adapter", format="adapter"))
        spread = _told(
            lambda: write_facts(editable, [FACT], "memit", [LAYER - 1, LAYER], quick(**BARE, steps=1), corpus)
        )
    return Case(editable, edit, missing, took, undone, logits, checkpoint, adapter, spread)


def _took(family: str, corpus: Corpus) -> float:
    """P(new object) after ROME with the default numbers of a value over P before, in a model that knows the fact.

    The key is the published one: in tiny models a subject's key where it is only mentioned is hardly that of the prompt
    (gpt_oss: a cosine of .5), and an update for their mean reaches neither in full.
    """
    editable = zoo.trained(family)
    text = editable.encode(FACT.text, FACT.new_object, FACT.span)

    def log_probability() -> float:
        return sum(ask(editable, [text])[text].log_probs)

    config = with_numbers(EditConfig(prompts=PromptConfig(contexts=0)), **PLAIN_KEY)
    edit, before = write_facts(editable, [FACT], "rome", [0], config, corpus), log_probability()
    with edit.applied(editable):
        return math.exp(log_probability() - before)


@cache
def reopened() -> dict[str, Tensor]:
    """The logits of every family's checkpoint in one fresh process, [1, 12, vocabulary]."""
    folders = [str(case(family).checkpoint) for family in FAMILIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REOPEN, *folders], capture_output=True, text=True, check=True, env=environment
    )
    found = [torch.tensor(json.loads(line), dtype=torch.float64) for line in done.stdout.splitlines()]
    return dict(zip(FAMILIES, found, strict=True))


# The table ----------------------------------------------------------------------------------------

HEAD = ("family", "model", "blocks", "value matrix", "stored", "gate", "activation", "experts", "works")
ABOUT = """# Families

Written by `python tests/helpers/families.py` from tiny models of transformers {version}, built from their
configurations; a test checks that the page is up to date. There is no list of supported models: a model is recognised
by its structure and verified by a forward pass, and models that are not in this table may work as well.

- **blocks**: *sequential* if the feed-forward layer reads the output of its block's attention, *parallel* if it does
  not. *normed*: its output is normalised before it is added to the residual stream. *× c*: it is multiplied by c.
- **value matrix**: its path inside a layer; **stored**: the module that contains it, as [d_model, d_ff] or transposed.
  The module declares its orientation; no property is derived from a shape.
- **gate**: whether the coefficients are multiplied by a second set; *fused*: both sets come from one matrix.
- **works**: *everything* means all of the following. Tracing works for states, feed-forward and attention outputs.
  Reruns begin at the token that changed, which may differ between the rows of a batch. The real forward pass gives the
  value of a fact that ROME wrote; in a model that was trained to know the old object, ROME with the default settings
  makes the new object more than twice as likely. An edit is applied and undone bit for bit. A fresh process opens the
  exported checkpoint with equal logits, and PEFT gives the same logits with the LoRA adapter. Several layers can share
  one value (MEMIT, AlphaEdit, EMMET). If reruns cannot begin at a token, whole texts are run again: slower, with the
  same numbers.

"""


def works(family: str) -> str:
    """What works, in words."""
    editable, found = case(family).editable, case(family)
    parts = {
        "tracing attention": bool(editable.attention),
        "reruns from a token": editable.resumable,
        "from each row's own": editable.ragged,
        "ROME": found.missed < NEAR and found.took > TWICE,
        "undo": found.undone,
        "a checkpoint": torch.equal(found.logits, reopened()[family]),
        "an adapter": not found.adapter,
        "several layers at once": not found.spread,
    }
    missing = [name for name, there in parts.items() if not there]
    return f"all but {', '.join(missing)}" if missing else "everything"


def row(family: str) -> tuple[str, ...]:
    """One line of the table."""
    editable = case(family).editable
    place = editable.feed_forward[LAYER]
    memory, way = place.memories[0], way_to_stream(family)
    join = ", normed" if way.norm is not None else "" if way.factor == 1 else f", × {way.factor:.3g}"
    path = f"{memory.name}.{memory.own}".split(f".{LAYER}.", 1)[1].removesuffix(".weight")
    experts, gate = "", "no"
    if place.mixture is not None:
        shared = len(place.mixture.shared)
        experts = f"{len(place.memories) - shared}" + (f" + {shared} shared" if shared else "")
    rows = memory.key_rows
    if rows.gated:
        gate = "fused" if rows.role.fused else "yes"
    return (
        family,
        type(editable.model).__name__,
        ("parallel" if parallel(editable) else "sequential") + join,
        f"`{path}`",
        type(memory.module).__name__ + (", transposed" if memory.stored_transposed else ""),
        gate,
        rows.activation_name.removesuffix("Activation"),
        experts,
        works(family),
    )


def tables() -> str:
    """docs/families.md, without the section of `pictures`."""
    lines = [HEAD, ("---",) * len(HEAD), *map(row, FAMILIES)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return ABOUT.format(version=transformers.__version__.split(".")[0]) + table


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    DOCUMENT.write_text(tables() + pictures.section(), encoding="utf-8")
