"""Published formulas behind the metrics, each one pure function with its unit, source and direction.

Notation: x a prompt, o an object with tokens o_1 … o_m after it, p(o_i | x, o_<i) the model's probability of a token.
Sources:

    ROME    Meng et al. 2022, arXiv 2202.05262, section 3.3 and the appendix on CounterFact
    zsRE    Levy et al. 2017; as ROME and MEMIT (arXiv 2210.07229, section 5) compute it
    CF+     Hoelscher-Obermaier et al. 2023, arXiv 2305.17553
    KnowEdit  Zhang et al. 2024, arXiv 2401.01286, as EasyEdit (Wang et al. 2023, arXiv 2308.07269) computes it
    MQuAKE  Zhong et al. 2023, arXiv 2305.14795
    Wild    Yang et al. 2025, arXiv 2502.11177: what teacher forcing hides
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from ffedit.facts.text import occurrences

if TYPE_CHECKING:
    from torch import Tensor

# ROME's weights of the entropies of bigrams and trigrams.
ENTROPY_WEIGHTS = {2: 2 / 3, 3: 4 / 3}
# Length of a run of tokens that counts as repeated where it occurs a second time.
REPEATED = 4
_MORE_DIGITS = re.compile(r"[.,]\d")
_WORDS = re.compile(r"\w+|[^\w\s]")
_TERMS = re.compile(r"\b\w\w+\b")


def nll(log_probs: Sequence[float]) -> float:
    """Mean negative log-likelihood of an object's tokens, −(1/m) Σ log p(o_i | x, o_<i); nats per token (ROME)."""
    return -fmean(log_probs)


def likelihood(log_probs: Sequence[float]) -> float:
    """Geometric mean of an object's token probabilities, exp(−nll); a probability (ROME)."""
    return math.exp(-nll(log_probs))


def success(favoured: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether nll(favoured) < nll(other), strictly: a tie is no success (ROME)."""
    return nll(favoured) < nll(other)


def magnitude(favoured: Sequence[float], other: Sequence[float]) -> float:
    """Difference of likelihoods, favoured − other; of probability, −1 to 1 (ROME). Up."""
    return likelihood(favoured) - likelihood(other)


def token_accuracy(argmax: Sequence[int], target: Sequence[int]) -> float:
    """Share of target tokens that are the argmax after the true tokens before them: *teacher-forced*. Up.

    A wrong token is forgiven at once, since the next one is predicted after the right one: Wild finds this far above
    free generation. Of several accepted answers only the first counts, as in EasyEdit (`ground_truth[0][0]`).
    """
    return fmean(a == t for a, t in zip(argmax, target, strict=True))


def exact_match(said: str, target: str, other: str = "", aliases: Sequence[str] = ()) -> bool:
    """Return whether free greedy generation says the whole target, or any of its `aliases`. Up (Wild).

    "Tommy" does not say "Tom", nor "10,000" "10". All texts come from one tokenizer, white space normalised; `said`
    should be a token longer than the target, its aliases and `other`, the object that could follow instead. Where
    `other` begins with the target and is said, the target is not. The same holds for aliases, which count as in
    MQuAKE's published code (the answer or one of its aliases); an alias that is `other` itself does not count.
    """
    if any(alias != other and exact_match(said, alias, other) for alias in aliases):
        return True
    if len(other) > len(target) and other.startswith(target) and exact_match(said, other):
        return False
    whole = target != "" and said.startswith(target) and next(occurrences(said, target), (1, 0))[0] == 0
    return whole and not (target[-1].isdigit() and _MORE_DIGITS.match(said, len(target)))


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(before ‖ after) = Σ p log(p/q) of next-token distributions; nats per token. Zero is best (CF+).

    Takes log-probabilities [.., vocabulary] of the unedited and of the edited model; returns one number per pair, [..].
    """
    # An impossible token (a padded vocabulary) adds 0; −inf − (−inf) would be NaN.
    terms = (before - after).masked_fill_(before.isneginf(), 0.0)
    return terms.mul_(before.exp()).sum(-1)


def perplexity(log_probs: Tensor) -> float:
    """Return exp of the mean negative log-likelihood of a text, from its tokens' log-probabilities [tokens]. Keep."""
    return float((-log_probs.cpu().double().mean()).exp())


def generation_entropy(text: str) -> float:
    """Weighted entropy of bigrams and trigrams of words, ½ Σ_n w_n H_n with w = ⅔, 4⁄3; bits (ROME, "fluency"). Keep.

    H_n = −Σ f log₂ f over the frequencies f of n-grams. Low where a damaged model repeats itself. Words and punctuation
    marks count as words.
    """
    words, entropies = _WORDS.findall(text), []
    for n, weight in ENTROPY_WEIGHTS.items():
        counts = Counter(zip(*(words[i:] for i in range(n)), strict=False))
        total = sum(counts.values())
        entropies.append(weight * (-sum(c / total * math.log2(c / total) for c in counts.values()) + 0.0))
    return fmean(entropies)


def degenerate(ids: Sequence[int], special: Collection[int]) -> float:
    """Share of a text's tokens that are special, or complete `REPEATED` tokens that occurred before in it. Zero.

    A damaged model generates special tokens, or the same words again and again. Shorter runs, such as names, are often
    repeated in ordinary text.
    """
    before: set[tuple[int, ...]] = set()
    count = 0
    for end, token in enumerate(ids, 1):
        run = tuple(ids[max(0, end - REPEATED) : end])
        count += token in special or run in before
        if len(run) == REPEATED:
            before.add(run)
    return count / len(ids)


def term_weights(documents: Sequence[str]) -> dict[str, float]:
    """Inverse document frequencies, ln((1 + N) / (1 + df)) + 1, of terms of two letters or more, in lower case.

    The formula and the terms are those of scikit-learn's `TfidfVectorizer`, which ROME uses. ROME fits it on all
    attribute snippets of CounterFact (`idf.npy` beside the data), whatever is scored. Here N and df count the reference
    texts of the facts, a shared text once per fact, so that the weights depend on the set of facts.
    """
    counts = Counter(term for document in documents for term in set(_TERMS.findall(document.lower())))
    return {term: math.log((1 + len(documents)) / (1 + df)) + 1 for term, df in counts.items()}


def reference_consistency(said: str, references: Sequence[str], weights: Mapping[str, float]) -> float:
    """Cosine of the TF-IDF vectors of generated text and of reference texts about the new object; 0 to 1 (ROME). Up.

    Models, methods, and scores before and after an edit can be compared on one set of facts, which fixes the weights;
    not across sets, nor digit for digit with published figures, which have weights from other texts (`term_weights`).
    `said` is all generated texts of a fact, joined. Terms without a weight do not count.
    """
    vectors = []
    for text in (said, " ".join(references)):
        counts = Counter(_TERMS.findall(text.lower()))
        vectors.append({term: count * weights[term] for term, count in counts.items() if term in weights})
    a, b = vectors
    norms = math.hypot(*a.values()) * math.hypot(*b.values())
    return sum(value * b[term] for term, value in a.items() if term in b) / norms if norms else 0.0
