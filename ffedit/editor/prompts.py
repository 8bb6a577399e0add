"""Build the prompts that a value is optimised on, and those whose predictions must not change.

A value optimised on a single prompt would overfit to it. ROME (arXiv 2202.05262, section 3.1) puts random prefixes
before the prompt and preserves the subject's *essence* with a KL term at "{subject} is a". The prefixes are sampled
from the model, with a seed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from ffedit.editor.config import EditConfig
from ffedit.facts.fact import Fact
from ffedit.inference.text import own_text
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode


@dataclass(frozen=True)
class PromptSet:
    """Texts that one value is optimised on, each containing the subject.

    Facts that share a subject share its key and thus their value: their prompts form one set, and they are solved
    jointly (one value for each would leave each about half, arXiv 2502.07322).

    Attributes:
        prompts: each fact's prompt, bare and after prefixes, with the new object as answer; the bare one comes first.
        fact_of: for each of `prompts`, index of the subject's fact that it states.
        essence: essence prompts, whose distribution at the last position is to be preserved.
        prefixes: as sampled.
        sinks: number of texts left out because the subject is an attention sink in them.
    """

    prompts: tuple[Encoded, ...]
    fact_of: tuple[int, ...]
    essence: tuple[Encoded, ...]
    prefixes: tuple[str, ...]
    sinks: int = 0

    def without(self, sinks: Collection[int]) -> PromptSet:
        """Leave out the texts `sinks`, by their index among the prompts followed by the essence prompts.

        A fact that no other prompt states keeps its prompts.
        """
        stated = {fact for i, fact in enumerate(self.fact_of) if i not in sinks}
        sinks = [i for i in sinks if i >= len(self.prompts) or self.fact_of[i] in stated]
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
        """Number of facts that the prompts state."""
        return len(set(self.fact_of))


def _sampled_prefixes(editable: Editable, config: EditConfig) -> tuple[str, ...]:
    """Sample short texts from the model, as contexts before a prompt."""
    tokens = config.prompts.context_tokens
    rows = own_text(editable, config.prompts.contexts, max(tokens, default=1), config.seed)
    lengths = islice(cycle(tokens), len(rows))
    texts = (decode(editable.tokenizer, row[:n], special=False).strip() for row, n in zip(rows, lengths, strict=True))
    return tuple(text for text in texts if text)


def build_prompts(editable: Editable, groups: Sequence[Sequence[Fact]], config: EditConfig) -> list[PromptSet]:
    """Build the prompt sets of several subjects, each with its facts; a subject's texts do not depend on the others.

    Raises:
        FactError: subject, prompt or object do not fit the tokenizer or the model.
    """
    leads = _sampled_prefixes(editable, config) if config.prompts.contexts else ()
    return [_prompt_set(editable, facts, leads, config) for facts in groups]


def _prompt_set(editable: Editable, facts: Sequence[Fact], leads: tuple[str, ...], config: EditConfig) -> PromptSet:
    """Build the prompt set of one subject; texts of more tokens than the model takes are left out."""
    limit, subject = editable.max_tokens, facts[0].subject
    # The bare prompts come first, so that an error in a fact is raised on its own prompt.
    at = config.key.fact_token
    bare = [replace(editable.encode(fact.text, fact.new_object, fact.span, limit), fact_token=at) for fact in facts]
    prompts: list[Encoded] = []
    fact_of: list[int] = []
    for i, fact in enumerate(facts):
        prompts.append(bare[i])
        for lead in leads:  # the prompt as a sentence of its own
            before = lead + (" " if lead[-1] in ".!?" else ". ")
            span = fact.span[0] + len(before), fact.span[1] + len(before)
            text = replace(editable.encode(before + fact.text, fact.new_object, span), fact_token=at)
            prompts += [text] if len(text.ids) <= limit else []
        fact_of += [i] * (len(prompts) - len(fact_of))
    essence = []
    for form in config.prompts.essence_prompts if config.value.kl_weight else ():
        start = form.index("{}")
        text = editable.encode(form.replace("{}", subject), span=(start, start + len(subject)))
        if len(text.ids) <= limit:
            essence.append(replace(text, fact_token=at))
    return PromptSet(tuple(prompts), tuple(fact_of), tuple(essence), leads)
