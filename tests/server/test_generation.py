"""Tokens and log-probabilities against transformers itself, alone and in batches."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from server.tiny_qwen3 import EOS, VOCABULARY, teacher_forced
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from weightcast.engines.gate import Gate
from weightcast.engines.transformers import Completion, Delta, QueueFullError, Request, SamplingParams, TextGenerator
from weightcast.errors import ClosedError
from weightcast.testing.transport_kit import PATIENCE_SECONDS

PROMPT = [5, 9, 17, 33, 2]
TOLERANCE = 1e-2
"""Of a log-probability: a padded batch, with a cache, adds up in another order than one forward pass."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=4, ignore_eos=True)


def unequal_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


def assert_matches(model: Qwen3ForCausalLM, completion: Completion) -> None:
    """Every reported log-probability is that of one forward pass over the finished sequence."""
    assert completion.logprobs is not None
    expected = teacher_forced(model, list(completion.prompt_token_ids), list(completion.token_ids))
    for row, token, got in zip(expected, completion.token_ids, completion.logprobs, strict=True):
        assert got.chosen == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert [p for _, p in got.top] == pytest.approx(row.topk(len(got.top)).values.tolist(), abs=TOLERANCE)
        assert [row[t].item() for t, _ in got.top] == pytest.approx([p for _, p in got.top], abs=TOLERANCE)


def test_greedy_alone_is_what_generate_computes(model: Qwen3ForCausalLM, generator: TextGenerator) -> None:
    reference = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    done = generator.generate([PROMPT], GREEDY)[0]
    assert list(done.token_ids) == reference.sequences[0, len(PROMPT) :].tolist()
    logprobs = [torch.log_softmax(logits[0].float(), dim=-1) for logits in reference.logits]
    assert [p.chosen for p in done.logprobs or ()] == [
        row[t].item() for row, t in zip(logprobs, done.token_ids, strict=True)
    ]


def test_a_batch_of_unequal_lengths_gives_what_each_prompt_gives_alone(
    model: Qwen3ForCausalLM, generator: TextGenerator
) -> None:
    prompts = unequal_prompts(12)
    together = generator.generate(prompts, GREEDY)
    alone = [generator.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.prompt_token_ids for c in together] == [tuple(p) for p in prompts]
    for completion in together:
        assert_matches(model, completion)


def test_requests_take_turns_without_a_trace(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    gate = Gate()
    with TextGenerator(model, tokenizer, gate=gate, max_batch_size=6) as generator:
        requests = [
            generator.submit(
                [prompt], SamplingParams(temperature=0, max_tokens=3 + 5 * (i % 4), logprobs=1, ignore_eos=True)
            )
            for i, prompt in enumerate(unequal_prompts(16))
        ]
        done = [request.future.result(30)[0] for request in requests]
    assert [len(c.token_ids) for c in done] == [3 + 5 * (i % 4) for i in range(16)]
    for completion in done:
        assert_matches(model, completion)


def test_sampled_logprobs_are_of_the_raw_logits(model: Qwen3ForCausalLM, generator: TextGenerator) -> None:
    sampling = SamplingParams(n=4, temperature=0.7, top_p=0.9, max_tokens=8, logprobs=2, seed=1, ignore_eos=True)
    completions = generator.generate([PROMPT, [7, 8]], sampling)
    assert [c.index for c in completions] == list(range(8))
    assert len({c.token_ids for c in completions}) > 4
    for completion in completions:
        assert_matches(model, completion)


def test_a_seed_gives_the_same_tokens_in_any_batch(generator: TextGenerator) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, max_tokens=10, seed=42, ignore_eos=True)
    alone = generator.generate([PROMPT], sampling)
    noise = [generator.submit([p], SamplingParams(max_tokens=20, ignore_eos=True)) for p in unequal_prompts(6)]
    crowded = generator.generate([PROMPT], sampling)
    assert [c.token_ids for c in alone] == [c.token_ids for c in crowded]
    assert len({c.token_ids for c in alone}) == 3
    for seed in (7, -42):
        other = generator.generate([PROMPT], SamplingParams(n=3, max_tokens=10, seed=seed, ignore_eos=True))
        assert other[0].token_ids != alone[0].token_ids
    for request in noise:
        request.future.result(30)


def test_sampling_follows_the_distribution(model: Qwen3ForCausalLM, generator: TextGenerator) -> None:
    num_drawn = 4000
    done = generator.generate([PROMPT], SamplingParams(n=num_drawn, max_tokens=1, seed=3, ignore_eos=True))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=VOCABULARY) / num_drawn
    expected = teacher_forced(model, PROMPT, [0])[0].exp()
    # Total variation of so many draws from the true distribution is about sqrt(vocabulary / (2 pi num_drawn)).
    assert (counts - expected).abs().sum() / 2 < 2 * (VOCABULARY / (2 * torch.pi * num_drawn)) ** 0.5


def test_top_p_draws_from_the_nucleus_only(model: Qwen3ForCausalLM, generator: TextGenerator) -> None:
    probs = teacher_forced(model, PROMPT, [0])[0].exp()
    ordered, order = probs.sort(descending=True)
    nucleus = set(order[: int((ordered.cumsum(0) < 0.3).sum()) + 1].tolist())
    done = generator.generate([PROMPT], SamplingParams(n=500, top_p=0.3, max_tokens=1, seed=3, ignore_eos=True))
    assert {c.token_ids[0] for c in done} == nucleus


def test_a_tiny_top_p_is_greedy(generator: TextGenerator) -> None:
    sampled = generator.generate([PROMPT], SamplingParams(top_p=1e-6, max_tokens=6, ignore_eos=True))[0]
    assert sampled.token_ids == generator.generate([PROMPT], GREEDY)[0].token_ids[:6]


def test_one_request_may_mix_greedy_with_sampled_neighbours(generator: TextGenerator, gate: Gate) -> None:
    expected = generator.generate([PROMPT], GREEDY)[0].token_ids
    gate.pause("keep")
    greedy = generator.submit([PROMPT], GREEDY)
    sampled = generator.submit([PROMPT], SamplingParams(top_p=0.8, max_tokens=12, logprobs=0, ignore_eos=True))
    plain = generator.submit([PROMPT], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    gate.resume()
    assert greedy.future.result(30)[0].token_ids == expected
    assert len(sampled.future.result(30)[0].logprobs or ()) == 12
    assert plain.future.result(30)[0].logprobs is None


def test_the_end_token_ends_and_is_reported(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, generator: TextGenerator
) -> None:
    third = generator.generate([PROMPT], GREEDY)[0].token_ids[2]
    stopped = generator.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(third,), ignore_eos=True)
    )[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == third
    assert len(stopped.token_ids) == 3
    assert stopped.text == tokenizer.decode(list(stopped.token_ids[:-1]))
    model.lm_head.weight.data[EOS] = 100 * model.lm_head.weight.data[third]
    ended = generator.generate([PROMPT], SamplingParams(n=8, max_tokens=64, seed=0))
    assert {c.finish_reason for c in ended} == {"stop"}
    assert all(c.token_ids[-1] == EOS and "<eos>" not in c.text for c in ended)


def test_stop_strings_cut_the_text_and_end_the_row(
    generator: TextGenerator, tokenizer: PreTrainedTokenizerFast
) -> None:
    words = generator.generate([PROMPT], GREEDY)[0].text.split()
    stop = f"{words[3]} {words[4][:2]}"
    done = generator.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=12, stop=("never", stop), ignore_eos=True)
    )[0]
    assert done.finish_reason == "stop"
    assert done.text == " ".join(words[:3]) + " "
    assert tokenizer.decode(list(done.token_ids)).split() == words[:5]


def test_stream_pieces_are_the_text(generator: TextGenerator) -> None:
    whole = generator.generate([PROMPT], GREEDY)[0]
    for stop, reason in ((), "length"), ((whole.text.split()[6],), "stop"):
        deltas: list[Delta] = []
        sampling = SamplingParams(temperature=0, max_tokens=12, stop=stop, ignore_eos=True)
        done = generator.submit([PROMPT], sampling, on_delta=deltas.append).future.result(30)[0]
        assert "".join(delta.text for delta in deltas) == done.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == done.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]


@pytest.mark.parametrize(
    ("prompts", "sampling", "says"),
    [
        ([[]], SamplingParams(), "empty"),
        ([], SamplingParams(), "empty"),
        ([[128]], SamplingParams(), "must be from 0 to 127"),
        ([[-1]], SamplingParams(), "must be from 0 to 127"),
        ([[5]], SamplingParams(stop_token_ids=(500,)), "must be from 0 to 127"),
        ([[5] * 250], SamplingParams(max_tokens=16), "limit of 256 tokens"),
    ],
)
def test_prompts_that_can_not_be_taken(
    generator: TextGenerator, prompts: list[list[int]], sampling: SamplingParams, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        generator.submit(prompts, sampling)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"logprobs": 21},
        {"logprobs": -1},
        {"seed": 1 << 64},
        {"stop": ("",)},
    ],
)
def test_parameters_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_without_a_tokenizer_tokens_still_come(model: Qwen3ForCausalLM, leaves_nothing: None) -> None:
    with TextGenerator(model, gate=Gate()) as generator:
        assert generator.generate([PROMPT], GREEDY)[0].text == ""
        with pytest.raises(ValueError, match="token ids"):
            generator.generate(["w5"], GREEDY)
        with pytest.raises(ValueError, match="stop_token_ids"):
            generator.submit([PROMPT], SamplingParams(stop=("x",)))


def test_the_queue_is_bounded_and_cancelling_makes_room(model: Qwen3ForCausalLM, gate: Gate) -> None:
    with TextGenerator(model, gate=gate, max_queue=4) as generator:
        gate.pause("keep")
        waiting = generator.submit([PROMPT], SamplingParams(n=4))
        with pytest.raises(QueueFullError, match="send the request again later"):
            generator.submit([PROMPT])
        with pytest.raises(ValueError, match="exceed the limit of 4 completions"):
            generator.submit([PROMPT], SamplingParams(n=5))
        waiting.cancel()
        again = wait_for_room(generator)
        gate.resume()
        assert len(again.future.result(30)) == 1


def wait_for_room(generator: TextGenerator) -> Request:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return generator.submit([PROMPT])
        except QueueFullError:
            assert time.monotonic() < end, "a cancelled request kept its place"
            threading.Event().wait(0.01)


def test_close_fails_what_is_left_and_ends_the_thread(
    model: Qwen3ForCausalLM, gate: Gate, leaves_nothing: None
) -> None:
    generator = TextGenerator(model, gate=gate)
    with pytest.raises(ValueError, match="has a generator already: make another Gate"):
        TextGenerator(model, gate=gate)
    gate.pause("keep")
    request = generator.submit([PROMPT])
    generator.close()
    generator.close()
    with pytest.raises(ClosedError):
        request.future.result(0)
    with pytest.raises(ClosedError):
        generator.submit([PROMPT])
    assert gate.drain is None


def test_what_the_model_raises_is_the_answer_of_that_request_only(
    model: Qwen3ForCausalLM, generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of something")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        with pytest.raises(RuntimeError, match="out of something"):
            generator.generate([PROMPT], GREEDY)
    assert len(generator.generate([PROMPT], GREEDY)[0].token_ids) == 12
