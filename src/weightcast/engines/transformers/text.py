"""Tokens to text while they come: whole characters only, cut at the first stop string.

Invariants: what `flush` has given out is never taken back, so text that could be the beginning of a stop string is
held; the pieces of `flush` joined are `text()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    eos_token_id: int | list[int] | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> str: ...


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones left out, spaces as the tokenizer has them."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextCursor:
    """One row's text. With neither stop strings nor a live reader nothing is decoded before the end."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], *, live: bool) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._incremental = tokenizer is not None and (bool(stop) or live)
        self._text = ""
        self._num_flushed = 0
        self._begin = 0
        self._end = 0
        self._num_hidden = 0
        self._is_cut = False

    def push(self, tokens: list[int], *, is_stop: bool) -> bool:
        """`tokens` has grown by one, which has no text if `is_stop`. True if the text has reached a stop string."""
        self._num_hidden = int(is_stop)
        if not self._incremental or is_stop:
            return False
        piece = self._pending(tokens)
        if not piece or piece.endswith(_UNFINISHED):
            return False
        self._text += piece
        self._begin, self._end = self._end, len(tokens)
        return self._cut(len(self._text) - len(piece))

    def finish(self, tokens: list[int]) -> None:
        """No token will follow: what was held back as half a character is text now."""
        if self._incremental and not self._is_cut:
            self._text += self._pending(tokens[: len(tokens) - self._num_hidden])

    def _pending(self, tokens: list[int]) -> str:
        # Decoded together with the piece before: alone, a token would lose its leading space.
        assert self._tokenizer is not None
        known = decode(self._tokenizer, tokens[self._begin : self._end])
        return decode(self._tokenizer, tokens[self._begin :])[len(known) :]

    def _cut(self, searched: int) -> bool:
        found = [
            at for at in (self._text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop) if at >= 0
        ]
        if found:
            self._text = self._text[: min(found)]
            self._is_cut = True
        return self._is_cut

    def flush(self, *, final: bool) -> str:
        """The text that has become certain since the last call; with `final`, all that is left."""
        end = len(self._text) if final else len(self._text) - self._num_held()
        piece = self._text[self._num_flushed : end]
        self._num_flushed = max(end, self._num_flushed)
        return piece

    def _num_held(self) -> int:
        longest = max(map(len, self._stop), default=1) - 1
        for num_chars in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-num_chars:]
            if any(stop.startswith(tail) for stop in self._stop):
                return num_chars
        return 0

    def text(self, tokens: list[int]) -> str:
        """All of the row's text, given all of its tokens."""
        if self._tokenizer is None:
            return ""
        if self._incremental:
            return self._text
        return decode(self._tokenizer, tokens[: len(tokens) - self._num_hidden])
