"""ffedit: find where a language model holds a fact, change it, measure what else moved, ship the model.

Feed-forward layers are key-value memories (Geva et al. 2021, arXiv 2012.14913) that can be edited (ROME, Meng et al.
2022, arXiv 2202.05262):

    editable = ffedit.load("atlas")
    fact = ffedit.Fact("Eiffel Tower", "{} is located in the city of", target="Rome", previous="Paris")
    trace = ffedit.locate(editable, fact)               # where is it recalled?
    edit = ffedit.edit(editable, [fact])                # the smallest change that stores the new one
    report = ffedit.evaluate(editable, [fact], edit)    # what changed, and what else
    ffedit.export(editable, edit, "out/")               # ship it
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ffedit import notebook
from ffedit.version import __version__

if TYPE_CHECKING:
    from ffedit.algebra.key_moments import KeyMoments
    from ffedit.algebra.low_rank import LowRank
    from ffedit.api import edit, load, stats
    from ffedit.benchmark import BenchReport, bench
    from ffedit.editor import (
        Corpus,
        Edit,
        EditConfig,
        KeyConfig,
        PromptConfig,
        ValueConfig,
        combine,
        load_stats,
        merge_stats,
        save_stats,
    )
    from ffedit.errors import CheckError, EditError, FactError, FFEditError, ModelError
    from ffedit.evaluator import Report, Scores
    from ffedit.evaluator.evaluate import evaluate
    from ffedit.exporter import Exported, export, undo
    from ffedit.exporter.diff import Diff, diff, recovered
    from ffedit.facts.fact import Fact, Probe
    from ffedit.facts.reading import read_facts, sift_facts
    from ffedit.inspector import Slot, inspect_edit, inspect_memory, inspect_model, inspect_prompt
    from ffedit.layer_choice.calibrate import Choice, LayerScore, choose_layer
    from ffedit.loading.load import load_stacks
    from ffedit.locator import Trace, TraceSet, locate, locate_all
    from ffedit.model.editable import Editable
    from ffedit.model.memory import Address, KeyValueMemory

# Results reach the display when one is first drawn.
notebook.drawing = lambda: import_module("ffedit.display.notebook")

# Where each name lives. It is imported when it is first used, so that `ffedit --help` need not wait for torch.
_HOMES = {
    "model.editable": ("Editable",),
    "api": ("edit", "load", "stats"),
    "benchmark": ("BenchReport", "bench"),
    "layer_choice.calibrate": ("Choice", "LayerScore", "choose_layer"),
    "exporter.diff": ("Diff", "diff", "recovered"),
    "editor": (
        "Corpus",
        "Edit",
        "EditConfig",
        "KeyConfig",
        "PromptConfig",
        "ValueConfig",
        "combine",
        "load_stats",
        "merge_stats",
        "save_stats",
    ),
    "errors": ("CheckError", "EditError", "FFEditError", "FactError", "ModelError"),
    "evaluator": ("Report", "Scores", "evaluate"),
    "facts.fact": ("Fact", "Probe"),
    "inspector": ("Slot", "inspect_edit", "inspect_memory", "inspect_model", "inspect_prompt"),
    "loading.load": ("load_stacks",),
    "locator": ("Trace", "TraceSet", "locate", "locate_all"),
    "algebra.low_rank": ("LowRank",),
    "model.memory": ("Address", "KeyValueMemory"),
    "algebra.key_moments": ("KeyMoments",),
    "facts.reading": ("read_facts", "sift_facts"),
    "exporter": ("Exported", "export", "undo"),
}

__all__ = [
    "Address",
    "BenchReport",
    "CheckError",
    "Choice",
    "Corpus",
    "Diff",
    "Edit",
    "EditConfig",
    "EditError",
    "Editable",
    "Exported",
    "FFEditError",
    "Fact",
    "FactError",
    "KeyConfig",
    "KeyMoments",
    "KeyValueMemory",
    "LayerScore",
    "LowRank",
    "ModelError",
    "Probe",
    "PromptConfig",
    "Report",
    "Scores",
    "Slot",
    "Trace",
    "TraceSet",
    "ValueConfig",
    "__version__",
    "bench",
    "choose_layer",
    "combine",
    "diff",
    "edit",
    "evaluate",
    "export",
    "inspect_edit",
    "inspect_memory",
    "inspect_model",
    "inspect_prompt",
    "load",
    "load_stacks",
    "load_stats",
    "locate",
    "locate_all",
    "merge_stats",
    "read_facts",
    "recovered",
    "save_stats",
    "sift_facts",
    "stats",
    "undo",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for from its home."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"ffedit.{home}"), name)
            return globals()[name]
    raise AttributeError(f"module 'ffedit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, imported already or not."""
    return __all__
