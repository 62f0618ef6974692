"""A tokenizer of one token a letter, which begins every text with a token of its own if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


class Letters:
    """Knows roles as <user> and <assistant>."""

    def __init__(self, *, begin: str = "") -> None:
        self.begin = begin

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in (self.begin if add_special_tokens else "") + text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: Literal[False]
    ) -> str:
        turns = "".join(f"<{message['role']}>{message['content']}" for message in conversation)
        return self.begin + turns + ("<assistant>" if add_generation_prompt else "")
