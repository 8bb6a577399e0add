"""ffedit: find where a language model holds a fact, change it, prove that nothing else moved, ship the model.

Feed-forward layers are key-value memories (Geva et al. 2021, arXiv 2012.14913) that can be edited (ROME, Meng et al.
2022, arXiv 2202.05262):

    editable = ffedit.load("atlas")
    fact = ffedit.Fact("Eiffel Tower", "{} is located in the city of", target="Rome", previous="Paris")
    trace = ffedit.locate(editable, fact)               # where is it recalled?
    edit = ffedit.edit(editable, [fact])                # the smallest change that stores the new one
    report = ffedit.evaluate(editable, [fact], edit)    # what changed, and what else
    ffedit.export(editable, edit, "out/")               # ship it
"""

from ffedit.anatomy import Editable
from ffedit.api import edit
from ffedit.checkpoint import export, load
from ffedit.editor import Corpus, Edit, EditConfig
from ffedit.errors import CheckError, EditError, FactError, FFEditError, ModelError
from ffedit.evaluator import Report, Scores, evaluate
from ffedit.facts import Fact, Probe
from ffedit.locator import Trace, TraceSet, locate
from ffedit.lowrank import LowRank
from ffedit.memory import Address, KeyValueMemory
from ffedit.reading import read_facts
from ffedit.version import __version__

__all__ = [
    "Address",
    "CheckError",
    "Corpus",
    "Edit",
    "EditConfig",
    "EditError",
    "Editable",
    "FFEditError",
    "Fact",
    "FactError",
    "KeyValueMemory",
    "LowRank",
    "ModelError",
    "Probe",
    "Report",
    "Scores",
    "Trace",
    "TraceSet",
    "__version__",
    "edit",
    "evaluate",
    "export",
    "load",
    "locate",
    "read_facts",
]
