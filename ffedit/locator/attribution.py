"""Attribution patching: a first-order estimate of every indirect effect at once.

Restoring an output a at token i and layer l changes the metric m, to first order around the corrupted run, by

    IE(i, l) ≈ (a_clean − a_corrupted) · ∂m/∂a |corrupted

so that one forward and one backward pass estimate what exact tracing measures with a run for each token and layer
(Nanda 2023, "Attribution patching: activation patching at industrial scale"; Syed et al. 2023, arXiv 2310.10348). The
estimate is good where the model is nearly linear between the two runs, and poor where it saturates. A window is
estimated by the sum over its layers, which is more than its first-order effect: an exact restoration also blocks the
effect of its earlier layers on its later ones. Compare with exact effects on a few facts before trusting the estimate.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from ffedit.inference import generation, replay
from ffedit.locator.cases import Batch, Run
from ffedit.locator.result import span_of
from ffedit.model.editable import Editable
from ffedit.model.hooks import frozen, replace_output


def estimate(editable: Editable, batch: Batch, run: Run) -> tuple[list[tuple[int, int, int]], Tensor]:
    """Estimate the effect of every restoration of `batch`; severing is not supported.

    Returns:
        the indices (case, layer, token) and the changes of the answers' log-probabilities there, [indices, samples,
        answers], nats. As in exact tracing, the token −1 stands for the layer alone at the subject's last token.
    """
    depth, places, found = len(editable.layers), [], []
    samples, answers = max(case.samples for case in batch.cases), len(batch.cases[0].answers)
    for number, case in enumerate(batch.cases):
        single = torch.full((depth, case.encoded.answer, samples, answers), torch.nan, dtype=torch.float64)
        for answer in range(answers):
            single[:, :, : case.samples, answer] = _single(editable, batch, run, number, answer)
        for layer in range(depth):
            inside = span_of(layer, run.window, depth)
            for position in range(case.subject[0], case.encoded.answer):
                places.append((number, layer, position))
                found.append(single[inside.start : inside.stop, position].sum(0))
            if run.window > 1:
                places.append((number, layer, -1))
                found.append(single[layer, case.encoded.subject_last])
    return places, torch.stack(found)


def _single(editable: Editable, batch: Batch, run: Run, number: int, answer: int) -> Tensor:
    """Estimate single layers for one case and answer, [layers, prompt tokens, samples], nats."""
    case = batch.cases[number]
    text = case.answers[answer]
    clean, first = (batch.row(number, answer, sample) for sample in (-1, 0))
    rows, length = torch.arange(first, first + case.samples), len(text.ids) - 1
    if run.kind == "state":
        modules, kept = list(editable.layers), batch.recording.states[1:]
    else:
        modules, kept = editable.outputs_of(run.kind), batch.recording.outputs[run.kind]
    # δ = 0 is added to every output, so the gradient for δ is the gradient for the output.
    deltas = [torch.zeros_like(output[rows, :length], requires_grad=True) for output in kept]
    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(frozen(editable.model))
        for module, delta in zip(modules, deltas, strict=True):
            stack.enter_context(replace_output(module, lambda out, delta=delta: out + delta.reshape(out.shape)))  # type: ignore[misc]
        texts = [text] * case.samples
        states = batch.recording.states[0][rows, :length]
        logits = replay.resume(editable, batch.recording, 0, states, rows, 0, generation.answer_reads(texts))
        gradients = torch.autograd.grad(generation.answer_sums(logits, texts).sum(), deltas)
    changes = [
        ((output[clean, :length] - output[rows, :length]) * gradient).double().sum(-1)
        for output, gradient in zip(kept, gradients, strict=True)
    ]
    return torch.stack(changes)[:, :, : case.encoded.answer].transpose(1, 2).cpu()
