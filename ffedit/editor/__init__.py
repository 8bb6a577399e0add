"""Write facts: choose key and value, solve for the smallest change, keep it as an `Edit` (ROME, arXiv 2202.05262)."""

from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.rome import METHODS, rome
from ffedit.editor.statistics import Corpus, collect_moments
from ffedit.editor.target import Reading, choose_value, read
from ffedit.editor.wording import Wording, word

__all__ = [
    "METHODS",
    "Corpus",
    "Edit",
    "EditConfig",
    "Reading",
    "Wording",
    "choose_value",
    "collect_moments",
    "read",
    "rome",
    "word",
]
