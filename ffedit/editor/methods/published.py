"""Numbers for v* that were published with ROME and MEMIT, as far as they hold on other models (`--preset paper`)."""

from __future__ import annotations

from dataclasses import replace

from ffedit.editor.config import EditConfig, KeyConfig, PromptConfig, ValueConfig

# The numbers that ROME's authors published for GPT-2 XL (arXiv 2202.05262, appendix E.5, and the parameters that came
# with the paper), used for every model. As published: 20 contexts of 5 and 10 tokens, Adam at a rate of 0.5 in the
# layer's own units, at most 20 steps, the end at a loss of 0.05, KL weight 0.0625 at "{} is a", ‖δ‖ of at most
# 4 ‖W k*‖. Not as published: the decay is of (‖δ‖ / ‖W k*‖)², theirs of ‖δ‖ / ‖W k*‖², which is not free of units; the
# divergence is that of the first distribution from the edited one, theirs the other way round, and is read at the
# prompt's last token; k* is one vector everywhere (arXiv 2403.07175); the loss is of the whole object, not of its mean
# token; the text behind C is this project's.
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

# Those of MEMIT's authors for GPT-J (arXiv 2210.07229, appendix, and the parameters that came with it). Not as
# published beside the above: their δ is bounded by 0.75 of the residual stream, here as ROME's; their λ (15,000 for
# GPT-J, times E[k kᵀ]) is one model's, here `ridge` is relative to the keys.
PAPER_MEMIT = replace(
    PAPER,
    prompts=replace(PAPER.prompts, contexts=5, context_tokens=(10,)),
    value=replace(PAPER.value, steps=25),
)
