"""One rank of the trainer: `python -m rl_demo.trainer SETTINGS RUN_DIRECTORY TRAINER_RANK`.

Every rank makes the same model, keeps its shards (FSDP2), warms up while the engines start, reads their URLs as one
JSON line from stdin, and trains: GRPO, one step off policy, with a publish in bf16 to every engine after each step.
Rank 0 also writes the model directory, requests the rollouts, checks the engines, and writes events to stdout.

Invariants: every token of a rollout is of a published version; a rank ends, and removes the run directory, when its
stdin closes, that is when the process that started it is gone.
"""

from __future__ import annotations

import json
import math
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from rl_demo import grpo, messages, policy, task
from rl_demo.grpo import Batch
from rl_demo.messages import DemoSettings, Evaluated, Event, RunEnded, Saved, Stepped, Warming
from rl_demo.rollouts import AnswerGroup, Rollouts, wait
from weightcast.errors import WeightcastError
from weightcast.host.deadline import Deadline
from weightcast.sources.module import ModuleSource
from weightcast.trainer.publisher import Publisher

WARMUP_RAMP_STEPS = 20
WARMUP_EVENTS = 20
MAX_GRAD_NORM = 1.0
TERMINATION_SECONDS = 5

Emit = Callable[[Event], None]


def main(argv: Sequence[str]) -> None:
    settings, directory, rank = msgspec.json.decode(argv[0], type=DemoSettings), Path(argv[1]), int(argv[2])
    # Rank 0 unwinds, which closes the publisher. The others may be inside a collective, where no Python code runs.
    signal.signal(signal.SIGTERM, signal.default_int_handler if rank == 0 else signal.SIG_DFL)
    engines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=_read_stdin, args=(engines, directory), daemon=True).start()
    # stdout is for events only: what libraries print goes to the log, with stderr.
    stdout = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def emit(event: Event) -> None:
        if rank == 0:
            with suppress(BrokenPipeError):  # _read_stdin ends the process, once it has removed the run directory
                stdout.write(msgspec.json.encode(event) + b"\n")

    torch.set_num_threads(1)  # here and in each engine: with more, processes on few cores wait for each other
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings.num_trainer_ranks)
    try:
        run(settings, directory, engines, emit)
    except WeightcastError as exc:
        emit(RunEnded(problem=f"{type(exc).__name__}: {exc}"))
        raise
    finally:
        dist.destroy_process_group()


def run(settings: DemoSettings, directory: Path, engines: queue.SimpleQueue[list[str]], emit: Emit) -> None:
    """Train, and check the engines. Raises PublishError, or PeerError if an engine does not answer."""
    deadline = Deadline(settings.budget_seconds)
    make_model = partial(policy.make_model, settings.seed, settings.hidden_size, settings.num_layers)
    model, is_first = make_model(), dist.get_rank() == 0
    if is_first:
        policy.save(model, directory / "model")
        emit(Saved(num_parameters=sum(p.numel() for p in model.parameters())))
    # On a CPU, torch's fused attention takes longer backwards in bf16 than all the rest of a small model together.
    model.set_attn_implementation("eager")
    shard(model, model.model.layers)
    warm_start(model, settings, emit)
    first_weights = full_weights(model)
    urls = engines.get()
    source, transport = ModuleSource(model, dtype=torch.bfloat16), messages.TRANSPORTS[settings.transport]
    with (
        Publisher(source, transport=transport, engines=urls) as publisher,
        closing(Rollouts(urls, prompts_per_request=settings.prompts_per_request, seed=settings.seed)) as rollouts,
    ):
        version = train(model, publisher, rollouts, settings, deadline, emit)
        last_weights = full_weights(model)
        if is_first:
            served, control = make_model(), make_model()
            served.load_state_dict(last_weights)
            control.load_state_dict(first_weights)
            puzzles = task.draw(random.Random(settings.seed), settings.check_prompts, settings.num_digits)
            for url in urls:
                emit(policy.check(url, rollouts, served, control, puzzles, version))
    emit(RunEnded(is_early=version < settings.num_steps))


def shard(model: Module, layers: Iterable[Module]) -> None:
    """Shard the model over all ranks (FSDP2), in fp32 for the optimizer; passes compute with its rounding to bf16.

    With bf16 weights alone most steps at the learning rates of RL would be rounded away.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*layers, model.float()):
        fully_shard(module, mesh=mesh, mp_policy=precision)


def warm_start(model: Module, settings: DemoSettings, emit: Emit) -> None:
    """Supervised imitation of an unreliable teacher, so that rewards begin above zero and below the top.

    Every rank draws the same batches and learns from its share of each.
    """
    rng = random.Random(f"{settings.seed}, warm start")
    deadline, num_steps = Deadline(settings.warmup_seconds), settings.warmup_steps
    optimizer = make_optimizer(model, settings.warmup_learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_RAMP_STEPS) * (1.0 - 0.9 * step / num_steps)
    )
    for step in range(1, num_steps + 1):
        puzzles = task.draw(rng, settings.warmup_batch_size, settings.num_digits)
        rows = [puzzle.prompt_ids + task.demonstrate(puzzle, rng) for puzzle in puzzles]
        tokens = torch.tensor(rows)[dist.get_rank() :: dist.get_world_size()]
        loss = -policy.logprobs(model, tokens, tokens[:, -(settings.num_digits + 1) :]).mean()
        update(model, optimizer, loss)
        schedule.step()
        if step % max(1, num_steps // WARMUP_EVENTS) == 0 or step == num_steps:
            emit(Warming(step=step, num_steps=num_steps, loss=mean_over_ranks(loss)))
        if has_passed(deadline):
            break


def train(
    model: Module, publisher: Publisher, rollouts: Rollouts, settings: DemoSettings, deadline: Deadline, emit: Emit
) -> int:
    """Publish the warm start as version 0, then each step's weights as the next version; return the last version.

    Half of a step's rollouts is requested before the policy is updated, so that engines and trainer work at the same
    time; the other half just before the publish, which therefore reaches engines that generate.
    """
    rank, num_ranks, version = dist.get_rank(), dist.get_world_size(), 0
    half = settings.prompts_per_step // 2
    rng = random.Random(f"{settings.seed}, training")
    eval_puzzles = task.draw(rng, settings.eval_prompts, settings.num_digits)
    optimizer = make_optimizer(model, settings.learning_rate)

    def request_half() -> list[Future[list[AnswerGroup]]]:
        puzzles = task.draw(rng, half if rank == 0 else 0, settings.num_digits)
        return rollouts.request(puzzles, settings.answers_per_prompt)

    def evaluate(when: str) -> None:
        if rank == 0:
            found = statistics(wait(rollouts.request(eval_puzzles, settings.eval_answers)), version)
            emit(Evaluated(when=when, version=version, reward=found["reward"], solved=found["solved"]))

    started = time.perf_counter()
    report = publisher.publish(version)
    emit(Stepped(report, 0.0, 0.0, time.perf_counter() - started, **statistics([], version)))
    evaluate("start")
    requests = [*request_half(), *request_half()]
    while version < settings.num_steps and not has_passed(deadline):
        started = time.perf_counter()
        groups = wait(requests)
        received = time.perf_counter()
        unknown = {v for group in groups for answer in group.answers for v in answer.versions} - {*range(version + 1)}
        if unknown:
            raise WeightcastError(f"rollouts came from versions {sorted(unknown)}; 0 to {version} were published")
        requests = request_half()
        empty = Batch.empty(2 * half * settings.answers_per_prompt, settings.num_digits)
        batch = grpo.collate(groups) if rank == 0 else empty
        for tensor in batch:
            dist.broadcast(tensor, src=0)
        # Ranks have different numbers of tokens, and FSDP2 takes the mean of their gradients.
        loss = grpo.loss(model, batch.shard(rank, num_ranks), num_tokens=batch.num_tokens / num_ranks)
        if not math.isfinite(mean := mean_over_ranks(loss)):
            raise WeightcastError(f"the loss became {mean} at version {version}: the training diverged")
        update(model, optimizer, loss)
        trained = time.perf_counter()
        requests += request_half()
        version += 1
        report = publisher.publish(version)
        seconds = received - started, trained - received, time.perf_counter() - started
        emit(Stepped(report, *seconds, **statistics(groups, version - 1)))
    wait(requests)
    evaluate("end")
    return version


def statistics(groups: Sequence[AnswerGroup], version: int) -> dict[str, Any]:
    """The fields of Stepped that describe rollouts, which the trainer received when it had this version."""
    rewards = [reward for group in groups for reward in group.rewards]
    versions = [answer.versions for group in groups for answer in group.answers]
    return {
        "reward": sum(rewards) / max(1, len(rewards)),
        "solved": rewards.count(1.0) / max(1, len(rewards)),
        "num_rollouts": len(rewards),
        "num_spanning": sum(len(set(each)) > 1 for each in versions),
        "num_tokens": sum(map(len, versions)),
        "num_stale_tokens": sum(number < version for each in versions for number in each),
    }


def make_optimizer(model: Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)


def update(model: Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one step with clipped gradients, and clear them. A collective."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()


def full_weights(model: Module) -> dict[str, torch.Tensor]:
    """A copy of all weights of a sharded model, on every rank. A collective."""
    return {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def has_passed(deadline: Deadline) -> bool:
    """Whether rank 0's deadline has passed; the same on every rank."""
    found = torch.tensor(int(deadline.has_passed))
    dist.broadcast(found, src=0)
    return bool(found)


def _read_stdin(engines: queue.SimpleQueue[list[str]], directory: Path) -> None:
    """Pass on the engines' URLs; at the end of stdin remove the run directory and end this process."""
    # Not sys.stdin: a thread that reads it holds a lock that the interpreter needs when the process ends.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        for line in stdin:
            engines.put(json.loads(line))
    shutil.rmtree(directory, ignore_errors=True)
    signal.alarm(TERMINATION_SECONDS)  # ends the process also where no Python code runs any more
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
