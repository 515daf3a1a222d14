"""`top_logprobs` goes by text, and tokens of one text do not displace each other."""

from __future__ import annotations

from weightcast.control.server.completions import AnswerFormat
from weightcast.engines.transformers import TokenLogprobs


def test_tokens_of_one_text_are_all_there() -> None:
    texts = {1: "a", 2: "\ufffd", 3: "\ufffd", 237: "\ufffd"}
    found = TokenLogprobs(-3.0, ((1, -0.5), (2, -1.0), (3, -2.0)))
    logprobs = AnswerFormat("model", texts.__getitem__)._logprobs([237], [found], "", 0)
    assert logprobs is not None
    assert logprobs["tokens"] == ["\ufffd"]
    assert logprobs["top_logprobs"] == [{"a": -0.5, "token_id:2": -1.0, "token_id:3": -2.0, "\ufffd": -3.0}]


def test_the_likeliest_has_the_text() -> None:
    texts = {1: "a", 2: "\ufffd", 3: "\ufffd"}
    found = TokenLogprobs(-0.5, ((1, -0.5), (2, -1.0), (3, -2.0)))
    logprobs = AnswerFormat("model", texts.__getitem__)._logprobs([1], [found], "a", 0)
    assert logprobs is not None
    assert logprobs["top_logprobs"] == [{"a": -0.5, "\ufffd": -1.0, "token_id:3": -2.0}]
