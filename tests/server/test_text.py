"""Text while its tokens come: whole characters, held before a stop string, and for bytes that are no UTF-8 as well."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from weightcast.engines.transformers import Delta, Request, SamplingParams

TEXT = "naïve 日本 🎉🎉 end"


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as tokenizers with byte fallback write what is not in their vocabulary."""
    vocabulary = {"<unk>": 256, **{f"<0x{value:02X}>": value for value in range(256)}}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def pieces(tokens: list[int], *stop: str) -> tuple[list[str], str]:
    """What a reader gets for each token and at the end, and the text."""
    deltas = list[Delta]()
    sampling = SamplingParams(stop=stop, max_tokens=1000)
    (row,) = Request([[1]], sampling, tokenizer=bytes_tokenizer(), on_delta=deltas.append).rows
    for token in tokens:
        if row.finish_reason is None:
            row.append(token, None, None)
    row.abort(None)
    return [delta.text for delta in deltas], row.text


def test_a_character_comes_with_its_last_byte() -> None:
    found, text = pieces(list(TEXT.encode()))
    assert text == TEXT
    assert [piece for piece in found if piece] == list(TEXT)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    found, text = pieces(list("a🎉".encode())[:-1])
    assert found[0] == "a"
    assert text == "".join(found) == "a" + "\N{REPLACEMENT CHARACTER}" * 3


@pytest.mark.parametrize(
    ("stop", "text"), [(("🎉 e",), "naïve 日本 🎉"), (("never", "日本"), "naïve "), (("endx",), TEXT)]
)
def test_what_could_begin_a_stop_string_is_held(stop: tuple[str, ...], text: str) -> None:
    found, whole = pieces(list(TEXT.encode()), *stop)
    assert whole == "".join(found) == text


def test_bytes_that_are_no_text_are_text_too() -> None:
    for seed in range(50):
        tokens = random.Random(seed).choices(range(256), k=30)
        found, text = pieces(tokens)
        assert "".join(found) == text
        assert len(text) > 10
