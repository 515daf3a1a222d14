"""Tokens to text while they are generated: whole characters only, cut at the first stop string.

Not `tokenizers.decoders.DecodeStream`: it raises at bytes that are no UTF-8, which a model under training generates,
never returns the half character that a sequence may end with, and takes no tokenizer that is written in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    eos_token_id: int | list[int] | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> str: ...


class TextCursor:
    """The text of one row. With neither stop strings nor a `live` reader, nothing is decoded before `finish`.

    Text that `flush` has returned is never taken back, so what could be the beginning of a stop string is held until
    more tokens decide. The pieces of `flush` joined are `text`.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...], *, live: bool) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._is_incremental = bool(stop) or live
        self._is_finished = False
        self._num_flushed = 0  # characters of `text`
        self._begin = self._end = 0  # the tokens that gave the newest piece of `text`

    def push(self, tokens: list[int]) -> bool:
        """Decode what is new in `tokens`, which have grown by one. True if the text has reached a stop string."""
        piece = self._undecoded(tokens) if self._is_incremental else ""
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):  # The rest of a character is still to come.
            return False
        searched = len(self.text)
        self.text += piece
        self._begin, self._end = self._end, len(tokens)
        found = [self.text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop]
        found = [at for at in found if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._is_finished = True
        return self._is_finished

    def finish(self, tokens: Sequence[int]) -> None:
        """No token will follow `tokens`: text that was held back for more is final. Only the first call counts."""
        if not self._is_finished:
            self.text += self._undecoded(tokens)
            self._is_finished = True

    def flush(self) -> str:
        """The text that has become certain since the last call."""
        num_held = 0
        if not self._is_finished:
            longest = max(map(len, self._stop), default=1) - 1
            tails = (self.text[-length:] for length in range(min(longest, len(self.text)), 0, -1))
            num_held = len(next((tail for tail in tails if any(stop.startswith(tail) for stop in self._stop)), ""))
        piece = self.text[self._num_flushed : len(self.text) - num_held]
        self._num_flushed += len(piece)
        return piece

    def _undecoded(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        # Decoded together with the piece before: alone, a token would lose its leading space.
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        known = self._tokenizer.decode(tokens[self._begin : self._end], **options)
        return self._tokenizer.decode(tokens[self._begin :], **options)[len(known) :]
