"""Equality-constrained batch editing: every fact gets its value exactly, at the least cost to other text.

Gupta et al. 2024, arXiv 2403.14236. ROME for several facts at once; they must not outnumber d_ff.
"""

from __future__ import annotations

from ffedit.editor.job import Method
from ffedit.editor.methods.memit import PAPER_MEMIT
from ffedit.editor.methods.rome import solve

# EMMET takes MEMIT's procedure for v*, and so its numbers.
EMMET = Method(
    "emmet",
    solves="(W+Δ)K = V for all facts at once, Δ of smallest C-norm",
    choose="a batch that must hold exactly, of fewer facts than d_ff",
    source="Gupta et al. 2024, arXiv 2403.14236",
    solve=solve,
    exact=True,
    layers=True,
    presets={"paper": PAPER_MEMIT},
)
