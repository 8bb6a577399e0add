"""Two honest rivals, as plain loops of whole forward passes: the published ROME, and a rank-one editor of sixty lines.

They use no tricks and waste nothing: no cache is built, no parameter gets a gradient, and the first step's pass also
gives what is read before it. From ffedit they take only the value matrix and the tokens of prompts, so that all editors
see the same prompts; the arithmetic is their own.

`published_rome` is Meng et al. 2022 (arXiv 2202.05262) as its code does it with the numbers of GPT-2 XL: the prompt
bare and after 20 sampled prefixes, v* by Adam at 0.5 (or another rate, chosen on development facts), ‖δ‖ at most 4
times the layer's output, 0.0625 KL(after ‖ before) after "{subject} is a", a decay of 0.5 ‖δ‖ / ‖W k‖², an end at a
loss of 0.05, Δ = δ (C⁻¹k*)ᵀ / (k*ᵀ C⁻¹ k*). Three things are not as in the code: k* is the same vector in the numerator
and the denominator, the mean over all contexts (the code divides by the bare prompt's, which arXiv 2403.07175
corrects); the divergence is read at the prompt's last token, as the paper has it, not at the subject's; and there may
be 25 steps, as later work takes, not 20. `published_code` runs the code itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ffedit import Address, Editable, Fact, FFEditError, KeyValueMemory, LowRank
from ffedit.model.hooks import frozen
from ffedit.model.tokenization import Encoded

# Sampled prefixes: (how many, of how many tokens), drawn among the likeliest.
PUBLISHED, FEW, TOP = ((10, 5), (10, 10)), ((8, 10),), 5
ESSENCE = "{} is a"
# Probability of the new object in every context at which the plain editor ends.
DONE = 0.6


@dataclass(frozen=True, eq=False)
class RankOne:
    """Δ = left rightᵀ.

    Attributes:
        address: address of the value matrix.
        left: [d_model], float64.
        right: [d_ff], float64.
        losses: loss before each step, nats.
    """

    address: Address
    left: Tensor
    right: Tensor
    losses: tuple[float, ...]

    @property
    def updates(self) -> dict[Address, LowRank]:
        """Return the change by address, as in an `ffedit.Edit`."""
        return {self.address: LowRank(self.left[:, None], self.right[None])}


@dataclass(frozen=True, eq=False)
class Solved(RankOne):
    """Δ with the key and the value that it was solved for.

    Attributes:
        key: k*, [d_ff], float64.
        value: v*, [d_model], float64: (W + Δ) k* = v*.
    """

    key: Tensor
    value: Tensor


def published_rome(
    editable: Editable,
    fact: Fact,
    layer: int,
    C: Tensor,
    prefixes: Sequence[str],
    steps: int = 25,
    rate: float = 0.5,
) -> Solved:
    """Compute the update that writes `fact`, as published.

    Args:
        editable: the model; nothing in it changes.
        fact: the fact to write.
        layer: the layer to edit.
        C: second moment of the layer's keys over ordinary text, [d_ff, d_ff], float64.
        prefixes: texts before the prompt, by `sampled_prefixes(editable, PUBLISHED)`; the bare prompt comes on top.
        steps: most forward passes.
        rate: Adam's rate; 0.5 for GPT-2 XL.
    """
    memory = matrix_of(editable, layer)
    stating = [state(editable, fact, prefix) for prefix in ("", *prefixes)]
    essence = editable.encode(ESSENCE.format(fact.subject), span=(0, len(fact.subject)))
    losses: list[float] = []
    with frozen(editable.model):
        delta = torch.zeros(memory.shape[0], device=editable.device, requires_grad=True)
        adam = torch.optim.Adam([delta], lr=rate)
        for step in range(steps):
            logits, keys, outputs = whole_pass(editable, memory, [*stating, essence], delta)
            after = logits[-1, len(essence.ids) - 1].log_softmax(-1)
            if step == 0:
                key, size, before = keys[:-1].double().mean(0), outputs[0].norm(), after.detach()
            nll = torch.stack([-log_probs(logits[i], text).mean() for i, text in enumerate(stating)]).mean()
            loss = nll + 0.0625 * (after.exp() * (after - before)).sum() + 0.5 * delta.norm() / size**2
            losses.append(loss.item())
            if losses[-1] < 0.05 or step == steps - 1:
                break
            adam.zero_grad()
            loss.backward()
            adam.step()
            with torch.no_grad():
                delta *= (4 * size / delta.norm()).clamp(max=1.0)
    return rank_one(memory, key, delta.detach(), C, losses)


def plain_rank_one(
    editable: Editable, fact: Fact, layer: int, C: Tensor | None, prefixes: Sequence[str], steps: int = 40
) -> Solved:
    """Compute the update of `fact` by the plainest means: a few prefixes, Adam in multiples of ‖W k*‖, no KL.

    Args:
        editable: the model; nothing in it changes.
        fact: the fact to write.
        layer: the layer to edit.
        C: as in `published_rome`; None for the identity.
        prefixes: texts before the prompt, by `sampled_prefixes(editable, FEW)`; the bare prompt comes on top.
        steps: most steps of Adam; it ends when every context gives the new object a probability of `DONE`.
    """
    memory = matrix_of(editable, layer)
    stating = [state(editable, fact, prefix) for prefix in ("", *prefixes)]
    losses: list[float] = []
    with frozen(editable.model):
        z = torch.zeros(memory.shape[0], device=editable.device, requires_grad=True)
        with torch.no_grad():
            key = whole_pass(editable, memory, stating, z)[1].double().mean(0)
        unit = (memory.value.double() @ key).norm().to(z) / len(z) ** 0.5  # δ = unit · z, so ‖δ‖ = ‖W k*‖ at z = 1
        adam = torch.optim.Adam([z], lr=0.1)
        for _ in range(steps):
            logits, _, _ = whole_pass(editable, memory, stating, unit * z)
            likelihoods = torch.stack([log_probs(logits[i], text).sum() for i, text in enumerate(stating)])
            loss = 0.5 * z.square().mean() - likelihoods.mean()
            losses.append(loss.item())
            if float(likelihoods.min()) > log(DONE):
                break
            adam.zero_grad()
            loss.backward()
            adam.step()
            with torch.no_grad():
                z *= (4 * len(z) ** 0.5 / z.norm()).clamp(max=1.0)
    return rank_one(memory, key, unit * z.detach(), C, losses)


def rank_one(memory: KeyValueMemory, key: Tensor, delta: Tensor, C: Tensor | None, losses: Sequence[float]) -> Solved:
    """Return the smallest change, in the norm of C, that moves the layer's output for `key` by `delta`."""
    u = key if C is None else torch.linalg.solve(C.to(key), key)
    value = memory.value.double() @ key + delta.double()
    right = u / (u @ key)
    return Solved(memory.address, delta.double(), right, tuple(losses), key, value)


def matrix_of(editable: Editable, layer: int) -> KeyValueMemory:
    """Return the value matrix of a layer.

    Raises:
        FFEditError: the layer has several.
    """
    memories = [memory for address, memory in editable.memories.items() if address.layer == layer]
    if len(memories) != 1 or memories[0].slot is not None:
        raise FFEditError(f"layer {layer} of {editable.name} has {len(memories)} value matrices; the rivals edit one")
    return memories[0]


def state(editable: Editable, fact: Fact, prefix: str) -> Encoded:
    """Return the prompt with the new object, after a prefix."""
    before = f"{prefix}. " if prefix else ""
    span = fact.span[0] + len(before), fact.span[1] + len(before)
    return editable.encode(before + fact.text, fact.new_object, span)


def whole_pass(
    editable: Editable, memory: KeyValueMemory, texts: Sequence[Encoded], delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all layers at all tokens of `texts`, with δ added to the matrix's output at each subject's last token.

    Returns:
        Logits [texts, tokens, vocabulary]; at the subjects' last tokens, the keys [texts, d_ff] and the matrix's
        outputs for them, [texts, d_model].
    """
    longest = max(len(text.ids) for text in texts)
    ids = torch.tensor([[*text.ids, *[0] * (longest - len(text.ids))] for text in texts], device=editable.device)
    mask = torch.tensor([[1] * len(t.ids) + [0] * (longest - len(t.ids)) for t in texts], device=editable.device)
    at = torch.arange(len(texts)), torch.tensor([text.subject_last for text in texts])
    seen: list[Tensor] = []

    def add(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # Some models flatten texts and tokens.
        moved = output.reshape(*ids.shape, -1).clone()
        seen.extend((inputs[0].reshape(*ids.shape, -1)[at].detach(), moved[at].detach()))
        moved[at] += delta.to(moved)
        return moved.reshape(output.shape)

    handle = memory.module.register_forward_hook(add)
    try:
        logits: Tensor = editable.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    finally:
        handle.remove()
    return logits.float(), seen[0], seen[1]


def log_probs(logits: Tensor, text: Encoded) -> Tensor:
    """Return the log-probability of each token of the new object; `logits` is [tokens, vocabulary]."""
    predicted = logits[text.answer - 1 : len(text.ids) - 1].log_softmax(-1)
    return predicted.gather(-1, torch.tensor(text.target_ids, device=logits.device)[:, None])[:, 0]


@torch.no_grad()
def sampled_prefixes(editable: Editable, asked: Sequence[tuple[int, int]], seed: int = 0) -> list[str]:
    """Return beginnings of texts that the model samples from its `TOP` likeliest tokens; they serve all its facts."""
    tokenizer, prefixes = editable.tokenizer, []
    # As in the published code, they follow the token that precedes a text, or that separates two.
    starts = (*editable.start_tokens[-1:], tokenizer.eos_token_id, tokenizer.bos_token_id, 0)
    start = next(token for token in starts if token is not None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for count, length in asked:
            rows = torch.full((count, 1), start, device=editable.device)
            sizes = {"min_new_tokens": length, "max_new_tokens": length, "pad_token_id": start}
            ids = editable.model.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=TOP, temperature=1.0, **sizes
            )
            texts = tokenizer.batch_decode(ids[:, 1:], skip_special_tokens=True)
            prefixes += [text.replace("{", " ").replace("}", " ").strip() for text in texts]
    return prefixes
