"""Compute an edit by any method: check what is asked, collect what the method needs, and run it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job
from ffedit.editor.methods import Method, check_method
from ffedit.editor.prompts import build_prompts
from ffedit.editor.statistics import moments_for
from ffedit.editor.target_layers import find_ff_layers, routed
from ffedit.errors import EditError
from ffedit.facts.fact import Fact, FactToken, by_subject, check_facts
from ffedit.inference.batching import refuse_out_of_memory
from ffedit.inference.corpus import Corpus
from ffedit.inference.routing import mixtures
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.hooks import eval_mode
from ffedit.model.memory import Address
from ffedit.model.storage import device_of, gives_gradient
from ffedit.progress import Progress, silent

logger = logging.getLogger(__name__)


def _check_quantised(editable: Editable, method: Method, where: Sequence[FeedForward]) -> None:
    """Refuse what would have to write to quantised weights on the way, or to pass gradients where none pass."""
    if len(where) > 1 or not method.statistics:
        raise EditError(
            f"{editable.name} is quantised, so that nothing can be written on the way to {method.name} in layers "
            f"{[ff.layer for ff in where]}; give one layer, and a method with key statistics (memit)"
        )
    with eval_mode(editable.model):
        if not all(
            gives_gradient(memory.module, device_of(memory.module)) for memory in where[0].memories if memory.quantised
        ):
            raise EditError(
                f"{editable.name} is quantised with kernels that pass no gradient on this device, which the choice of "
                "a value needs; use another --device, or edit the model in 16 or 32 bits and export an adapter"
            )


def in_reach(editable: Editable, facts: Sequence[Fact], method: Method, layers: range, token: FactToken) -> range:
    """Return those of `layers` from which a value written at `token` reaches the answer of every fact.

    Fine-tuning writes no value at a token, but changes the layer at all of them.

    Raises:
        EditError: there is none.
        FactError: a prompt or object does not fit the tokenizer or the model.
    """
    last = len(editable.layers) - 1
    if last not in layers or not method.statistics:
        return layers
    texts = (replace(editable.encode(fact.text, fact.new_object, fact.span), fact_token=token) for fact in facts)
    if all(text.site == text.answer - 1 for text in texts):
        return layers
    if len(layers) > 1:
        return layers[:-1]
    lower = "" if last == 0 else "name layer 0, or " if last == 1 else f"name a layer from 0 to {last - 1}, or "
    raise EditError(
        f"layer {last} is the last of {editable.name}: no layer after it carries what it writes at the token "
        f"{token} to the end of the prompt, where the answer is read; {lower}read the key there (--fact-token last)"
    )


def write(
    editable: Editable,
    facts: Sequence[Fact],
    method: str,
    layers: Sequence[int],
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    after: Sequence[Edit] = (),
    progress: Progress = silent,
) -> Edit:
    """Compute an edit that writes `facts` into `layers` of the model as it is.

    Args:
        editable: the model; as before afterwards.
        facts: what to write; those of one subject are solved jointly.
        method: a name in `METHODS`.
        layers: where.
        config: all numbers.
        stats: second moments of the keys of these layers, or the text to collect them on; None: the text that ships, or
            what the model samples where it does not speak that, the more the more subjects there are.
        after: earlier edits that are in the model and are to be kept, oldest first.
        progress: told how far it is.

    Raises:
        FactError: a fact cannot be used with this model.
        EditError: an unknown method, facts that contradict each other, layers, statistics or earlier edits that do not
            fit, or no solution.
    """
    chosen = check_method(method)
    check_facts(facts)
    if not chosen.layers and len(layers) != 1:
        raise EditError(f"{method} writes to one layer, found {list(layers)}; name one")
    if not layers or len(set(layers)) < len(layers):
        raise EditError(f"layers {list(layers)} were asked for; name at least one, and each once")
    depth = len(editable.layers)
    for layer in layers:
        if not 0 <= layer < depth:
            raise EditError(f"layer {layer} was asked for, but {editable.name} has layers 0 to {depth - 1}")
    config, groups = chosen.complete(config or chosen.preset("default")), by_subject(facts)
    highest = max(layers)
    in_reach(editable, facts, chosen, range(highest, highest + 1), config.key.fact_token)
    mixed = bool(set(layers) & set(mixtures(editable)))
    prompt_sets = build_prompts(editable, groups, config) if mixed else []
    where = find_ff_layers(editable, sorted(layers), prompt_sets)
    check_after(editable, after)
    if any(memory.quantised for ff in where for memory in ff.memories):
        _check_quantised(editable, chosen, where)
    moments: Mapping[Address, KeyMoments] = {}
    if chosen.statistics:
        memories = [memory for ff in where for memory in ff.memories]
        moments = moments_for(editable, memories, stats, len(groups), config.seed, progress)
    counted = f"{len(facts)} fact{'' if len(facts) == 1 else 's'}"
    refusal = EditError(
        f"not enough memory to write {counted} by {method}: beside the model, some matrices of d_ff² float64 "
        "numbers are needed; write fewer facts or layers, or use another --device"
    )
    with refuse_out_of_memory(refusal):
        job = Job(editable, facts, where, config, moments, after, progress)
        edit = routed(job, chosen.run(job), prompt_sets)
    logger.info("edit %s by %s, layers %s", edit.fingerprint(), method, edit.layers)
    return edit


def check_after(editable: Editable, after: Sequence[Edit]) -> None:
    """Refuse earlier edits of another model, and those that are not in its weights.

    What the keys of preserved edits give is read from the weights, so that an edit which is not there would be kept as
    if it were. The model's history knows what ffedit wrote, in this process or in the checkpoint. An edit that was
    computed on the weights as they are is not in them; its keys may be kept nonetheless.
    """
    unknown = {}
    for edit in after:
        name = edit.fingerprint()
        for at, delta in edit.updates.items():
            shape = list(editable.memories[at].shape) if at in editable.memories else "none"
            if shape != list(delta.shape):
                raise EditError(
                    f"the earlier edit {name} changes a value matrix {list(delta.shape)} in layer {at}, where "
                    f"{editable.name} has {shape}; leave it out, or load the model that it was made for"
                )
        if name not in editable.history.known:
            unknown[name] = edit
    now = fingerprint(editable) if unknown else ""
    for name, edit in unknown.items():
        if edit.base != now:
            raise EditError(
                f"the earlier edit {name} was computed on other weights than {editable.name} has, and is not in its "
                "history (a checkpoint that ffedit exports carries one); apply it first, or leave it out"
            )
