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

from ffedit.version import __version__

if TYPE_CHECKING:
    from ffedit.anatomy import Editable
    from ffedit.api import edit, stats
    from ffedit.benchmark import BenchReport, bench
    from ffedit.calibration import Choice, LayerScore, choose_layer
    from ffedit.checkpoint import load
    from ffedit.difference import Diff, diff
    from ffedit.editor import Corpus, Edit, EditConfig, combine, load_stats, merge_stats, save_stats
    from ffedit.errors import CheckError, EditError, FactError, FFEditError, ModelError
    from ffedit.evaluator import Report, Scores
    from ffedit.evaluator.evaluate import evaluate
    from ffedit.facts import Fact, Probe
    from ffedit.inspector import Slot, inspect_edit, inspect_memory, inspect_model, inspect_prompt
    from ffedit.loading_stacks import load_stacks
    from ffedit.locator import Trace, TraceSet, locate
    from ffedit.lowrank import LowRank
    from ffedit.memory import Address, KeyValueMemory
    from ffedit.moments import KeyMoments
    from ffedit.reading import read_facts, sift_facts
    from ffedit.recovering import recovered
    from ffedit.shipping import export, undo

# Where each name lives. It is imported when it is first used, so that `ffedit --help` need not wait for torch.
_HOMES = {
    "anatomy": ("Editable",),
    "api": ("edit", "stats"),
    "benchmark": ("BenchReport", "bench"),
    "calibration": ("Choice", "LayerScore", "choose_layer"),
    "checkpoint": ("load",),
    "difference": ("Diff", "diff"),
    "editor": ("Corpus", "Edit", "EditConfig", "combine", "load_stats", "merge_stats", "save_stats"),
    "errors": ("CheckError", "EditError", "FFEditError", "FactError", "ModelError"),
    "evaluator": ("Report", "Scores", "evaluate"),
    "facts": ("Fact", "Probe"),
    "inspector": ("Slot", "inspect_edit", "inspect_memory", "inspect_model", "inspect_prompt"),
    "loading_stacks": ("load_stacks",),
    "locator": ("Trace", "TraceSet", "locate"),
    "lowrank": ("LowRank",),
    "memory": ("Address", "KeyValueMemory"),
    "moments": ("KeyMoments",),
    "reading": ("read_facts", "sift_facts"),
    "recovering": ("recovered",),
    "shipping": ("export", "undo"),
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
    "FFEditError",
    "Fact",
    "FactError",
    "KeyMoments",
    "KeyValueMemory",
    "LayerScore",
    "LowRank",
    "ModelError",
    "Probe",
    "Report",
    "Scores",
    "Slot",
    "Trace",
    "TraceSet",
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
    """The public names, imported already or not."""
    return __all__
