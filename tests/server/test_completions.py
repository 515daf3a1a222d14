"""The OpenAI routes over a real socket: forms of prompts, fields of answers, streams, errors, clients that go away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from server.tiny_qwen3 import RUN, make_model
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from weightcast.control.server.app import EngineServer
from weightcast.engines.gate import Gate
from weightcast.engines.transformers import SamplingParams
from weightcast.testing.transport_kit import PATIENCE_SECONDS

PROMPT = [5, 9, 17]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def complete(http: httpx.Client, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, what
        threading.Event().wait(0.01)


def test_text_and_token_ids_give_the_same(http: httpx.Client) -> None:
    expected = complete(http)["choices"][0]
    assert expected["prompt_token_ids"] == PROMPT
    for prompt in ("w5 w9 w17", ["w5 w9 w17"], [PROMPT]):
        assert complete(http, prompt)["choices"] == [expected]
    answer = complete(http, ["w5 w9 w17", "w7"], n=2, model="tiny")
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [PROMPT, PROMPT, [7], [7]]
    assert answer["choices"][0]["token_ids"] == expected["token_ids"]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"


def test_logprobs_have_openais_form(
    http: httpx.Client, server: EngineServer, tokenizer: PreTrainedTokenizerFast
) -> None:
    choice = complete(http, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert server.generator is not None
    expected = server.generator.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    )[0]
    assert expected.logprobs is not None
    assert found["tokens"] == tokenizer.convert_ids_to_tokens(choice["token_ids"])
    assert found["token_logprobs"] == pytest.approx([p.chosen for p in expected.logprobs])
    assert [choice["text"][at:].split()[0] for at in found["text_offset"]] == found["tokens"]
    for top, one in zip(found["top_logprobs"], expected.logprobs, strict=True):
        assert top == pytest.approx({tokenizer.convert_ids_to_tokens(t): p for t, p in one.top})
    assert complete(http)["choices"][0]["logprobs"] is None
    only_chosen = complete(http, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in only_chosen["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_every_answer_names_its_version(http: httpx.Client, install: Callable[[Qwen3ForCausalLM, int], None]) -> None:
    first = complete(http)
    assert (first["weight_version"], first["weight_run"]) == ("default", "")
    assert first["choices"][0]["weight_versions"] == [{"run": "", "version": "default", "start": 0, "end": 6}]
    install(make_model(1), 7)
    then = complete(http, n=2)
    assert (then["weight_version"], then["weight_run"]) == ("7", RUN)
    for choice in then["choices"]:
        assert choice["weight_versions"] == [{"run": RUN, "version": "7", "start": 0, "end": 6}]


def test_a_stream_adds_up_to_the_answer(http: httpx.Client) -> None:
    whole = complete(http, n=2, logprobs=1)["choices"]
    body = {"prompt": PROMPT, **GREEDY, "n": 2, "logprobs": 1, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    for expected in whole:
        chunks = [c for event in events[:-1] for c in json.loads(event)["choices"] if c["index"] == expected["index"]]
        assert "".join(c["text"] for c in chunks) == expected["text"]
        assert [t for c in chunks for t in c["token_ids"]] == expected["token_ids"]
        assert [c["finish_reason"] for c in chunks] == [None] * 5 + ["length"]
        for field in ("tokens", "token_logprobs", "top_logprobs"):
            assert [x for c in chunks for x in c["logprobs"][field]] == expected["logprobs"][field]
        assert [s["start"] for c in chunks for s in c["weight_versions"]] == list(range(6))


def test_stop_and_seed_reach_the_generator(http: httpx.Client) -> None:
    words = complete(http)["choices"][0]["text"].split()
    stopped = complete(http, stop=words[2])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (" ".join(words[:2]) + " ", "stop")
    by_id = complete(http, stop_token_ids=[int(words[1][1:])])["choices"][0]
    assert (by_id["text"], by_id["finish_reason"]) == (words[0], "stop")
    seeded = [complete(http, temperature=1, seed=s)["choices"][0]["token_ids"] for s in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_the_body_that_routers_make_of_a_request_gives_the_same(http: httpx.Client) -> None:
    """As sglang-router 0.3.2 and vllm-router 0.1.17 sent it for the other one."""
    body = (
        b'{"model":"tiny","prompt":"w5 w9 w17","temperature":0.0,"stream":false,"echo":false,'
        b'"no_stop_trim":false,"ignore_eos":false,"skip_special_tokens":true,"return_hidden_states":false}'
    )
    routed = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    asked = http.post("/v1/completions", json={"model": "tiny", "prompt": "w5 w9 w17", "temperature": 0})
    assert [routed.status_code, asked.status_code] == [200, 200], routed.text
    assert routed.json()["choices"] == asked.json()["choices"]


def test_models(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "empty or a mixture"),
        ({"prompt": [1, "a"]}, 400, "mixture"),
        ({"prompt": [True]}, 400, "bool"),
        ({"prompt": "w5", "echo": True}, 400, "echo is not supported"),
        ({"prompt": "w5", "best_of": 3}, 400, "best_of is not supported"),
        ({"prompt": "w5", "logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
        ({"prompt": "w5", "presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
        ({"prompt": "w5", "no_stop_trim": True}, 400, "no_stop_trim is not supported"),
        ({"prompt": "w5", "return_hidden_states": True}, 400, "return_hidden_states is not supported"),
        ({"prompt": "w5", "skip_special_tokens": False}, 400, "skip_special_tokens is not supported"),
        ({"prompt": "w5", "top_k": 5}, 400, "unknown field `top_k`"),
        ({"prompt": "w5", "temperature": -1}, 400, "temperature is -1"),
        ({"prompt": "w5", "n": 0}, 400, "n is 0"),
        ({"prompt": "w5", "n": 1000}, 400, "limit of 64"),
        ({"prompt": "w5", "max_tokens": 1000}, 400, "256 tokens"),
        ({"prompt": "w5", "logprobs": 21}, 400, "logprobs is 21"),
        ({"prompt": [[128]]}, 400, "must be from 0 to 127"),
        ({"prompt": "w5", "model": "other"}, 404, "no model 'other'"),
        ({"prompt": "w5", "stream": True, "n": 0}, 400, "n is 0"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(http: httpx.Client, body: dict[str, Any], status: int, says: str) -> None:
    answer = http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, status, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100000])
def test_what_is_not_a_body_is_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_body_over_the_cap_is_413(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b" " * ((16 << 20) + 1))
    assert answer.status_code == 413
    assert complete(http)["choices"]


def test_torn_is_503_until_healed(
    http: httpx.Client, gate: Gate, install: Callable[[Qwen3ForCausalLM, int], None]
) -> None:
    gate.tear("half of version 3")
    answer = http.post("/v1/completions", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")
    assert "half of version 3" in answer.json()["error"]["message"]
    assert http.get("/health").status_code == 503
    install(make_model(1), 4)
    assert http.get("/health").status_code == 200
    assert complete(http)["weight_version"] == "4"


def test_torn_in_mid_stream_ends_the_stream_with_the_error(http: httpx.Client, gate: Gate) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        gate.tear("half of version 3")
        events = [line.removeprefix("data: ") for line in lines]
    assert "half of version 3" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    gate.set_version(gate.version)


def test_a_full_queue_is_429(http: httpx.Client, server: EngineServer, gate: Gate) -> None:
    assert server.generator is not None
    gate.pause("keep")
    waiting = server.generator.submit([PROMPT], SamplingParams(n=64))
    answer = http.post("/v1/completions", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"
    waiting.cancel()
    gate.resume()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_gives_its_rows_back(server: EngineServer, gate: Gate, stream: bool) -> None:
    generator = server.generator
    assert generator is not None
    body = json.dumps({"prompt": PROMPT, "n": 3, "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    gate.pause("keep")
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(head + body)
        wait_until(lambda: generator.num_waiting == 3, "the request did not arrive")
    wait_until(lambda: generator.num_waiting + generator.num_running == 0, "the rows of a gone client stayed")
    gate.resume()


def test_closing_the_server_answers_what_it_still_owes(server: EngineServer, gate: Gate) -> None:
    gate.pause("keep")
    answers: list[httpx.Response] = []
    asker = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT}, timeout=PATIENCE_SECONDS)
        )
    )
    asker.start()
    generator = server.generator
    assert generator is not None
    wait_until(lambda: generator.num_waiting == 1, "the request did not arrive")
    server.close()
    asker.join(PATIENCE_SECONDS)
    assert [(a.status_code, a.json()["error"]["type"]) for a in answers] == [(503, "service_unavailable")]
