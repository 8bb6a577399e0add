"""Rank-one model editing: one fact, one key, one value, the smallest change that joins them.

Meng et al. 2022, arXiv 2202.05262. It is the equality solution (EMMET's) for one subject after another, each on top of
those before it, always with the same k* in numerator and denominator (arXiv 2403.07175 shows what happens otherwise).
"""

from __future__ import annotations

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import equality
from ffedit.editor.config import EditConfig, KeyConfig, PromptConfig, ValueConfig
from ffedit.editor.job import Method, Problem

# The numbers that ROME's authors published for GPT-2 XL (arXiv 2202.05262, appendix E.5, and the parameters that came
# with the paper), used for every model. As published: 20 contexts of 5 and 10 tokens, Adam at a rate of 0.5 in the
# layer's own units, at most 20 steps, the end at a loss of 0.05, KL weight 0.0625 at "{} is a", ‖δ‖ of at most
# 4 ‖W k*‖. Not as published: the decay is of (‖δ‖ / ‖W k*‖)², theirs of ‖δ‖ / ‖W k*‖², which is not free of units; the
# divergence is KL(unedited ‖ edited), theirs KL(edited ‖ unedited), and is read at the prompt's last token; k* is one
# vector everywhere (arXiv 2403.07175); the loss is of the whole object, not of its mean token; C is that of other text;
# the first token of a text, which their C counts, is left out of C and keeps its value.
PAPER = EditConfig(
    prompts=PromptConfig(contexts=20, essence_prompts=("{} is a",)),
    key=KeyConfig(context_weight=0.0, mention_share=0.0, names_weight=0.0),
    value=ValueConfig(
        steps=20,
        step_size=0.5,
        optimizer="adam",
        target_probability=2.0,
        target_loss=0.05,
        weight_decay=0.5,
        kl_weight=0.0625,
        penalty_decay=1.0,
    ),
)


def solve(problem: Problem) -> LowRank:
    """Return the Δ of smallest C-norm with (W + Δ) K = V and Δ K_p = 0."""
    return equality(problem.W, problem.K, problem.V, problem.metric, problem.kept)


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
