"""Clients of a server, in a process of their own: they stream without end and write down when each token came.

Run as a program: `stream_clients.py URL NUM_CLIENTS NUM_TOKENS`. It prints "streaming" once every client has had a
token; at the end of its input it stops, and prints one JSON object. Times are of the monotonic clock, in seconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx


class Client(threading.Thread):
    """One request after another, with prompts of its own. `times`: of each request, when each of its messages came."""

    def __init__(self, url: str, num_tokens: int, index: int, over: threading.Event) -> None:
        super().__init__()
        self.times: list[list[float]] = []
        self.error = ""
        self._url = url
        self._num_tokens = num_tokens
        self._index = index
        self._over = over

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as http:
                while not self._over.is_set():
                    self._request(http)
        except Exception as exc:
            self.error = f"{type(exc).__name__}: {exc}"

    def _request(self, http: httpx.Client) -> None:
        self.times.append([])
        prompt = [10 + self._index, 30 + len(self.times) % 400, 7, 8, 9]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": self._num_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        num_tokens = 0
        with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {reply.read().decode()}")
            for line in reply.iter_lines():
                if self._over.is_set():
                    return
                if line.startswith("data: {"):
                    self.times[-1].append(time.monotonic())
                    # vLLM puts tokens that came while it was busy into one message.
                    num_tokens += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
        if num_tokens < self._num_tokens:
            raise RuntimeError(f"only {num_tokens} of {self._num_tokens} tokens came: {line}")


def main(url: str, num_clients: int, num_tokens: int) -> None:
    over = threading.Event()
    clients = [Client(url, num_tokens, index, over) for index in range(num_clients)]
    for client in clients:
        client.start()
    while not all(client.error or (client.times and client.times[0]) for client in clients):
        over.wait(0.01)
    print("streaming", flush=True)
    sys.stdin.read()
    over.set()
    for client in clients:
        client.join()
    errors = [client.error for client in clients if client.error]
    print(json.dumps({"errors": errors, "requests": [times for client in clients for times in client.times]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
