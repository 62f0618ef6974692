"""The arena's tokenizer: a word list over the text of `task.py`, as a real Hugging Face tokenizer.

Every token is a literal piece of text and decoding joins the pieces, so decode(encode(text)) == text for every text of
the task. A signed term is one token and a value is two digits: a vocabulary so small that a policy of a few million
parameters learns the arithmetic in minutes."""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.arena.task import ANSWER_MARK, CONNECTORS, MAX_TERM, MAX_TERMS, VERBS

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""What is said and nothing else: the task has no word for who says it."""


def vocabulary() -> tuple[str, ...]:
    """All tokens in order of their ids."""
    marks = ("start ", " =\n", " check ", "=", " ", "\n", f" {ANSWER_MARK}")
    digits = tuple(str(digit) for digit in range(10))
    terms = tuple(f"{sign}{term}" for sign in "+-" for term in range(1, MAX_TERM + 1))
    numbers = tuple(f" ({number})" for number in range(1, MAX_TERMS + 1))
    words = tuple(f" {word} " for word in CONNECTORS + VERBS)
    return (PAD, EOS, UNKNOWN, *marks, *digits, *terms, *numbers, *words)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = vocabulary()
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN))
    # Longest first: " check " must not be cut at the lone space that it begins with.
    pieces = sorted(tokens, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(re.escape(piece) for piece in pieces)), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
