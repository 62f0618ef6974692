"""The arena's tokenizer: a Hugging Face tokenizer with a word list for the text of `task.py`.

Tokens are literal pieces of text, so decode(encode(text)) == text for every text of the task. A signed term is one
token and a value two digits. With this small vocabulary a policy of a few million parameters learns the arithmetic in
minutes.
"""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.arena.task import ANSWER_MARK, CONNECTORS, MAX_TERM, MAX_TERMS, VERBS

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Message contents only, since the task has no tokens for roles."""


def vocabulary() -> tuple[str, ...]:
    """Return all tokens in the order of their ids."""
    marks = ("start ", " =\n", " check ", "=", " ", "\n", f" {ANSWER_MARK}")
    digits = tuple(str(digit) for digit in range(10))
    terms = tuple(f"{sign}{term}" for sign in "+-" for term in range(1, MAX_TERM + 1))
    numbers = tuple(f" ({number})" for number in range(1, MAX_TERMS + 1))
    words = tuple(f" {word} " for word in CONNECTORS + VERBS)
    return (PAD, EOS, UNKNOWN, *marks, *digits, *terms, *numbers, *words)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = vocabulary()
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=UNKNOWN))
    # Longest first, so that " check " is not split at its first space.
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
