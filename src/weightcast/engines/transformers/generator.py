"""Generator: requests wait in a bounded queue; each is decoded as one batch, and running requests alternate step by
step.

Invariants: one thread uses the model; every forward pass is one step of the gate, so an install waits for at most one;
the KV cache of one version is never read under another; no request begins while a pause drains the running ones.

transformers' continuous batching is not used: it has one random seed for all requests, log-probabilities only of the
chosen token, and keeps its KV cache when the weights change.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from weightcast.engines.gate import Gate
from weightcast.engines.transformers.batch import CausalModel, DecodeBatch
from weightcast.engines.transformers.request import Completion, Delta, Request, SamplingParams, Tokenizer
from weightcast.errors import ClosedError, EngineTornError, PeerTimeoutError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.host.closing import ClosedOnExit, close_at_exit, on_failure
from weightcast.host.deadline import POLL_SECONDS
from weightcast.seams.adapters import RequestAdapters


class QueueFullError(WeightcastError):
    """The generator's queue of completions is full; send the request again later."""


class TextGenerator(ClosedOnExit):
    """Generates with `model` in a background thread; puts it into eval mode. All methods are thread-safe.

    `adapters`: the model's `LoraLayers`, if requests can name LoRA adapters.
    `tokenizer`: may be None if prompts are token ids and no text is needed. At most `max_batch_size` sequences run at
    once, unless one request alone has more, and at most `max_queue` completions wait. Memory: the KV cache of the
    running sequences, twice while a cache grows.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        gate: Gate,
        max_batch_size: int = 256,
        max_queue: int = 8192,
        adapters: RequestAdapters | None = None,
    ) -> None:
        if gate.drain is not None:
            raise ValueError("the gate has a generator already: make another Gate for this generator")
        self.gate = gate
        self.tokenizer = tokenizer
        self.adapters = adapters
        self._model = CausalModel(model, tokenizer)
        self.max_model_len = self._model.max_model_len
        """Limit on the tokens of a sequence, prompt and output together."""
        self._max_batch_size = max_batch_size
        self._max_queue = max_queue
        self._condition = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: deque[DecodeBatch] = deque()
        self._is_aborting = False
        self._is_closed = False
        gate.drain = self._drain
        self._thread = threading.Thread(target=self._run, name="weightcast-generator", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def is_alive(self) -> bool:
        """True while the generator's thread runs."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Number of completions in the queue."""
        with self._condition:
            return sum(len(request.rows) for request in self._waiting)

    @property
    def num_running(self) -> int:
        with self._condition:
            return sum(len(batch.request.rows) for batch in self._running)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        adapter: str = "",
    ) -> Request:
        """Queue prompts of token ids; return at once. `on_delta` is called for each token, from another thread.

        `adapter`: the name of one, or of a version, `policy@7`. The request keeps to the version that is current now.
        Raises LookupError for an unknown adapter, ValueError for prompts that this model does not support,
        QueueFullError, EngineTornError while the engine is torn, ClosedError.
        """
        sampling = sampling or SamplingParams()
        self._model.check(prompts, sampling)
        if len(prompts) * sampling.n > self._max_queue:
            raise ValueError(
                f"{len(prompts)} prompts with n={sampling.n} exceed the limit of {self._max_queue} completions: send "
                "fewer"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this generator lacks: use stop_token_ids")
        eos = frozenset() if sampling.ignore_eos else self._model.eos_token_ids
        request = Request(
            prompts,
            sampling,
            tokenizer=self.tokenizer,
            stop_token_ids=eos.union(sampling.stop_token_ids),
            on_delta=on_delta,
            weight_version=self.gate.version,
        )
        if adapter:
            adapters = self.adapters
            if adapters is None:
                raise LookupError(f"there is no adapter {adapter!r}: this model was started without adapters")
            request.adapter = label = adapters.begin_request(adapter)  # it stays loaded until the request is done
            request.future.add_done_callback(lambda _: adapters.end_request(label))
        with on_failure(request.cancel), self._condition:
            if self._is_closed:
                raise ClosedError("the generator was closed: make another one")
            if self.gate.torn:
                raise EngineTornError(self.gate.torn)
            if self.num_waiting + len(request.rows) > self._max_queue:
                raise QueueFullError(
                    f"{self.num_waiting} completions wait, and {len(request.rows)} more exceed the limit of "
                    f"{self._max_queue}: send the request again later, or a smaller one"
                )
            self._waiting.append(request)
            self._condition.notify_all()
        return request

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        timeout_seconds: float = 60.0,
        adapter: str = "",
    ) -> list[Completion]:
        """Continue each prompt (text or token ids) and wait for all. Raises what `submit` does, PeerTimeoutError."""
        if isinstance(prompts, str):
            raise TypeError(f"prompts is a str; pass a list of prompts: [{prompts[:40]!r}]")
        request = self.submit([self.encode(p) if isinstance(p, str) else p for p in prompts], sampling, adapter=adapter)
        try:
            return request.future.result(timeout_seconds)
        except TimeoutError as exc:
            raise PeerTimeoutError(
                f"the completions were not generated within timeout_seconds={timeout_seconds:g}: use a longer timeout, "
                "or fewer tokens",
                peer="engine",
            ) from exc
        finally:
            request.cancel()

    def encode(self, text: str) -> list[int]:
        """Convert text to token ids. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("this generator has no tokenizer: send prompts as token ids, and no stop strings")
        return list(self.tokenizer.encode(text))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; `token_id:5` without a tokenizer."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def close(self) -> None:
        """End the thread, after its current step; unfinished requests fail with ClosedError. Idempotent."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout=60.0)
        if self.gate.drain == self._drain:
            self.gate.drain = None

    # --- the generator's thread ---

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    try:
                        with self.gate.step(timeout_seconds=POLL_SECONDS) as version:
                            self._step(version)
                    except PeerTimeoutError:
                        pass  # paused: checked again in the next turn
                    except (EngineTornError, ClosedError) as exc:
                        self._fail_all(exc)
                    self._drop_what_is_over()
        finally:
            with self._condition:
                self._is_closed = True
            self._fail_all(ClosedError("the generator was closed before the request was answered"))

    def _wait_for_work(self) -> bool:
        """Wait until there is a request; return False once the generator is closed."""
        with self._condition:
            while not (self._is_closed or self._running or (self._waiting and not self.gate.is_draining)):
                self._condition.wait(POLL_SECONDS if self._waiting else None)
            return not self._is_closed

    def _step(self, version: WeightVersion | None) -> None:
        """Begin the requests for which there is room, and make one step of the next running request."""
        with self._condition:  # so that a drain sees each request either waiting or running
            while self._waiting and not self.gate.is_draining:
                num_rows = self.num_running + len(self._waiting[0].rows)
                if self._running and num_rows > self._max_batch_size:
                    break
                self._running.append(DecodeBatch(self._model, self._waiting.popleft()))
            if self._is_aborting or not self._running:
                return
            self._running.rotate(-1)
            batch = self._running[-1]
        if batch.request.future.done():
            return
        adapters = self.adapters
        try:
            with contextlib.nullcontext() if adapters is None else adapters.using(batch.request.adapter):
                batch.step(version)
        except Exception as exc:  # an error of the model fails this request; the generator goes on
            batch.request.fail(exc)

    def _drop_what_is_over(self) -> None:
        """Between steps: drop answered and cancelled requests, and wake a drain that waits for them."""
        for batch in self._running if self._is_aborting else ():
            for row in batch.request.rows:
                row.abort(self.gate.version)
            batch.request.answer_if_over()
        with self._condition:
            self._running = deque(batch for batch in self._running if not batch.request.future.done())
            self._waiting = deque(request for request in self._waiting if not request.future.done())
            if not self._running:
                self._is_aborting = False
            self._condition.notify_all()

    def _fail_all(self, error: Exception) -> None:
        with self._condition:
            requests = [*self._waiting, *(batch.request for batch in self._running)]
            self._waiting.clear()
            self._running.clear()
            self._condition.notify_all()
        for request in requests:
            request.fail(error)

    # --- the gate's thread ---

    def _drain(self, mode: str, deadline_seconds: float) -> None:
        """See `Gate`: wait until the running requests have ended, or end them."""
        with self._condition:
            self._is_aborting = mode == "abort" and bool(self._running)
            self._condition.notify_all()
            if self._condition.wait_for(lambda: not self._running, deadline_seconds):
                return
            self._is_aborting = False
            raise PeerTimeoutError(
                f"{self.num_running} sequences still ran after {deadline_seconds:g} s: pause with mode=abort or "
                "mode=keep",
                peer="engine",
            )
