# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE with SmolLM2's way of cutting text, and a stand-in of plain bytes.

Text becomes ids in three steps: cut into pieces (digits alone, then words, numbers, signs and spaces),
write each byte of a piece as one visible character, and join neighbours in the order of the merge list.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Protocol

# The characters of Unicode's White_Space property. Python's `\s` also takes U+001C to U+001F.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

# English contractions, words, signs, spaces, each with at most one space in front. Of several spaces before
# a word the last one stays with the word. Applied to text without digits, where `[^\W_]` are the letters.
_PIECE = re.compile(
    rf"'(?:[sdmt]|ll|ve|re)| ?[^\W_]+| ?(?:_|[^\w{_SPACE}])+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)

START, END = "<|im_start|>", "<|im_end|>"
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    stop_tokens: frozenset[int]

    def encode_chat(self, prompt: str) -> list[int]:
        """Ids of a conversation in which the user has said `prompt` and the model is to answer."""

    def token_bytes(self, token: int) -> bytes:
        """Give the bytes of one token; a character may go on in the next token."""


class BpeTokenizer:
    """Byte-level BPE.

    Parameters
    ----------
    tokens
        The text of each id; special tokens as they are, others written in `byte_characters`.
    merges
        Pairs ``"left right"``, the first one to be joined first.
    special
        Ids that stand for no text. Text never becomes one of them, whatever it says.
    stop_tokens
        Ids that end an answer.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], special: Sequence[int], stop_tokens: Sequence[int]
    ) -> None:
        self._tokens = list(tokens)
        self._special = frozenset(special)
        self._ids = {text: index for index, text in enumerate(tokens) if index not in self._special}
        self._special_ids = {tokens[index]: index for index in special}
        self._ranks = {_pair(merge): rank for rank, merge in enumerate(merges)}
        self.stop_tokens = frozenset(stop_tokens)
        self._bytes_of = {character: byte for byte, character in byte_characters().items()}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        characters = byte_characters()
        ids: list[int] = []
        for piece in split_pieces(text):
            visible = "".join(characters[byte] for byte in piece.encode("utf-8", errors="replace"))
            for part in merge_parts(tuple(visible), self._ranks):
                if part not in self._ids:
                    raise ValueError(f"text: the vocabulary has no token {part!r}")
                ids.append(self._ids[part])
        return ids

    def encode_chat(self, prompt: str) -> list[int]:
        """Write `prompt` as a conversation; a prompt that spells a special token is text like any other."""
        if not {START, END} <= self._special_ids.keys():
            return self.encode(prompt)  # a model without conversations continues the text
        start, end, newline = self._special_ids[START], self._special_ids[END], self.encode("\n")
        return [
            *(start, *self.encode(f"system\n{SYSTEM_PROMPT}"), end, *newline),
            *(start, *self.encode(f"user\n{prompt}"), end, *newline),
            *(start, *self.encode("assistant\n")),
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special ones left out."""
        return b"".join(self.token_bytes(token) for token in tokens).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Give the bytes of one token, none for a special one."""
        if token in self._special:
            return b""
        return bytes(self._bytes_of[character] for character in self._tokens[token])


class ByteTokenizer:
    """Ids 0 to 255 are bytes; others, which a model with random weights will say, are shown as ``<id>``."""

    stop_tokens: frozenset[int] = frozenset()

    def encode_chat(self, prompt: str) -> list[int]:
        """Give the bytes of `prompt`; a model with random weights knows no conversations."""
        return list(prompt.encode("utf-8", errors="replace"))

    def token_bytes(self, token: int) -> bytes:
        """Give the byte, or ``<id>``."""
        return bytes([token]) if token < 256 else f"<{token}>".encode()


def split_pieces(text: str) -> Iterator[str]:
    """Cut `text` into the pieces inside which bytes may be joined; together they are `text`."""
    for is_number, run in groupby(text, key=lambda c: unicodedata.category(c).startswith("N")):
        if is_number:
            yield from run  # each digit is a piece of its own
        else:
            yield from _PIECE.findall("".join(run))


def merge_parts(parts: tuple[str, ...], ranks: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """Join neighbours, always the pair of the lowest rank (the leftmost first), until no pair is left."""
    unknown = len(ranks)
    while len(parts) > 1:
        best = min(pairwise(parts), key=lambda pair: ranks.get(pair, unknown))
        if best not in ranks:
            break
        joined: list[str] = []
        for part in parts:
            if joined and (joined[-1], part) == best:
                joined[-1] += part
            else:
                joined.append(part)
        parts = tuple(joined)
    return parts


@lru_cache(maxsize=1)
def byte_characters() -> dict[int, str]:
    """One visible character for each byte: itself where Latin-1 shows it, else the next from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right
