"""In which words is the new fact trained, and which words must not change?

One prompt alone would be learnt by heart. ROME (arXiv 2202.05262, section 3.1) puts random prefixes before it and
keeps the subject's *essence* with a KL term at "{subject} is a". The prefixes come from the model itself, sampled with
a seed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ffedit.editor.config import EditConfig
from ffedit.facts.fact import Fact
from ffedit.inference.text import own_text
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode


@dataclass(frozen=True)
class PromptSet:
    """The texts that one value is optimised on, each with the subject in it.

    Facts that share a subject share its key and thus their value: they are worded together, and solved jointly (one
    value for each would leave each about half, arXiv 2502.07322).

    Attributes:
        prompts: each fact's prompt, bare and after prefixes, with the new object as answer; the bare one comes first.
        fact_of: for each of `prompts`, which of the subject's facts it states.
        essence: essence prompts; the last position's distribution is to stay.
        prefixes: the sampled prefixes, for the provenance.
        sinks: how many texts were left out because the subject is an attention sink in them.
    """

    prompts: tuple[Encoded, ...]
    fact_of: tuple[int, ...]
    essence: tuple[Encoded, ...]
    prefixes: tuple[str, ...]
    sinks: int = 0

    def without(self, sinks: Collection[int]) -> PromptSet:
        """Leave out some texts, by their number among the prompts and the essence prompts behind them."""
        prompts = [i for i in range(len(self.prompts)) if i not in sinks]
        essence = [text for i, text in enumerate(self.essence, len(self.prompts)) if i not in sinks]
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in prompts),
            fact_of=tuple(self.fact_of[i] for i in prompts),
            essence=tuple(essence),
            sinks=len(sinks),
        )

    @property
    def facts(self) -> int:
        """How many facts it words."""
        return len(set(self.fact_of))


def prefixes(editable: Editable, config: EditConfig) -> tuple[str, ...]:
    """Short texts of the model's own, as contexts before a prompt."""
    rows = own_text(editable, config.contexts, max(config.context_tokens, default=1), config.seed)
    lengths = [config.context_tokens[i % len(config.context_tokens)] for i in range(len(rows))]
    texts = [
        decode(editable.tokenizer, row[:length], special=False).strip()
        for row, length in zip(rows, lengths, strict=True)
    ]
    return tuple(text for text in texts if text)


def _after(prefix: str, text: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """`text` as a sentence of its own after `prefix`, and where its span went."""
    lead = prefix + (" " if prefix[-1] in ".!?" else ". ")
    return lead + text, (span[0] + len(lead), span[1] + len(lead))


def build_prompts(editable: Editable, groups: Sequence[Sequence[Fact]], config: EditConfig) -> list[PromptSet]:
    """Gather the texts for some subjects, each with its facts; a subject's texts do not depend on the others.

    Raises:
        FactError: subject, prompt or object do not fit the tokenizer or the model.
    """
    leads = prefixes(editable, config) if config.contexts else ()
    return [_word(editable, facts, leads, config) for facts in groups]


def _word(editable: Editable, facts: Sequence[Fact], leads: tuple[str, ...], config: EditConfig) -> PromptSet:
    limit, subject = editable.max_tokens, facts[0].subject
    # The bare prompts come first: whatever is wrong with a fact shows here.
    at = config.fact_token
    bare = [replace(editable.encode(fact.text, fact.new_object, fact.span, limit), fact_token=at) for fact in facts]
    prompts: list[Encoded] = []
    fact_of: list[int] = []
    for i, fact in enumerate(facts):
        moved = [_after(lead, fact.text, fact.span) for lead in leads]
        longer = [replace(editable.encode(text, fact.new_object, span), fact_token=at) for text, span in moved]
        fitting = [bare[i], *(text for text in longer if len(text.ids) <= limit)]
        prompts += fitting
        fact_of += [i] * len(fitting)
    essence = []
    for form in config.essence_prompts if config.kl_weight else ():
        start = form.index("{}")
        text = editable.encode(form.replace("{}", subject), span=(start, start + len(subject)))
        if len(text.ids) <= limit:
            essence.append(replace(text, fact_token=at))
    return PromptSet(tuple(prompts), tuple(fact_of), tuple(essence), leads)
