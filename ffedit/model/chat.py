"""Prompts and answers in a chat template: the prompt is the user's turn, the answer the beginning of the assistant's.

So a fact is traced, edited and measured in the same tokens that a user of the chat model produces. The template writes
its special tokens itself, BOS included, and none are added. The space between its last mark and the answer is the one
that it writes itself (none in most, one in a few). Where a template can leave reasoning out (`enable_thinking`), it is
left out: otherwise no answer would begin with the object.

Everything else is plain text: texts for statistics, for drift, and what the model samples without a prompt.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ffedit.errors import FactError, ModelError

# Stands for the prompt when its position in the template is looked for.
MARK = "\ue000\ue001\ue000"


def turn(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str = "") -> tuple[str, str, int]:
    """Put a prompt, and its answer, into the template.

    Args:
        tokenizer: with a chat template.
        prompt: the user's turn, without white space around it.
        answer: the assistant's first words, without white space around them; "" for none.

    Returns:
        The text up to the answer, the text with it, and the character offset of the prompt in both.

    Raises:
        ModelError: there is no template, or it cannot be used.
        FactError: the template changes the prompt.
    """
    asked = _rendered(tokenizer, prompt)
    before, _, after = _rendered(tokenizer, MARK).partition(MARK)
    if asked != before + prompt + after:
        raise FactError(f"the chat template changes the prompt {prompt!r}; give other words, or leave chat out")
    if not answer:
        return asked, asked, len(before)
    whole = _rendered(tokenizer, prompt, answer)
    rest = whole[len(asked) :] if whole.startswith(asked) else ""
    space = rest[: len(rest) - len(rest.lstrip())]
    return asked, asked + (space if rest.startswith(space + answer) else "") + answer, len(before)


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str | None = None) -> str:
    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer or ""}]
    try:
        text = tokenizer.apply_chat_template(
            said[: 1 if answer is None else 2],
            tokenize=False,
            add_generation_prompt=answer is None,
            enable_thinking=False,
        )
    except Exception as error:  # a template is a program, and may raise any error
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template; leave chat out, or load a chat model") from error
        raise ModelError(f"the tokenizer's chat template cannot be used: {' '.join(str(error).split())}") from error
    assert isinstance(text, str)
    return text
