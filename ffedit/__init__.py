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

import lazy_loader

from ffedit.errors import meant, warn_renamed
from ffedit.version import RENAMED

# The public names stand in `__init__.pyi`, each is imported when it is first used: torch and transformers take seconds.
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name in RENAMED:
        warn_renamed(f"ffedit.{name}", f"ffedit.{RENAMED[name]}")
        name = RENAMED[name]
    if name not in __all__:
        raise AttributeError(f"module 'ffedit' has no attribute {name!r}{meant(name, __all__)}")
    return _import(name)
