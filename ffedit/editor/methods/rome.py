"""Rank-one model editing: one fact, one key, one value, the smallest change that joins them.

Meng et al. 2022, arXiv 2202.05262. It is the equality solution (EMMET's) for one subject after another, each on top of
those before it, always with the same k* in numerator and denominator (arXiv 2403.07175 shows what happens otherwise).
"""

from __future__ import annotations

from ffedit.editor.methods.emmet import solve
from ffedit.editor.methods.method import Method
from ffedit.editor.methods.published import PAPER

ROME = Method(
    "rome",
    solves="(W+Δ)k = v for one subject after another, Δ of smallest C-norm",
    choose="one fact, or a few: exact, the reference for the others",
    source="Meng et al. 2022, arXiv 2202.05262",
    solve=solve,
    exact=True,
    one_by_one=True,
    presets={"paper": PAPER},
)
