"""Run by test_collective_exit.py: one end of a transfer over gloo, which ends in mid-broadcast and closes nothing.

Arguments: "sender" and its deadline, or "receiver", which reads the sender's address from stdin. Where it says a word
it goes on when a line comes on stdin.
"""

from __future__ import annotations

import contextlib
import sys

from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.testing.transport_kit import (
    LinkAddress,
    RecoveringSender,
    address_of,
    make_receiver,
    make_sender,
    write_raw_header,
)

URL = "gloo://127.0.0.1:0"
BUCKET_BYTES = 32 << 20
EXIT_STATUS = 7
VERSION = WeightVersion("5a" * 16, 1)
MANIFEST = plan([TensorSpec(f"t{i}", "uint8", (BUCKET_BYTES,)) for i in range(4)], BUCKET_BYTES)


def say(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def send(deadline_seconds: float) -> None:
    """One bucket; then, whatever has become of the receiver, another one."""
    made = make_sender(contextlib.ExitStack(), URL, run=VERSION.run, deadline_seconds=deadline_seconds)
    sender = RecoveringSender(made)
    say(" ".join(address_of(sender, URL)))
    sender.open(MANIFEST, VERSION, peers=["a"], staged=True)
    for index in range(2):
        if index == 1:
            say("sent")
        buffer, num_bytes = sender.buffer(index), MANIFEST.buckets[index]
        sender.send(index, write_raw_header(buffer, num_bytes, VERSION, index))


def receive(address: str) -> None:
    receiver = make_receiver(contextlib.ExitStack(), LinkAddress(*address.split()), "a", run=VERSION.run)
    receiver.open(MANIFEST, VERSION, staged=True)
    print("open", flush=True)
    next(iter(receiver))
    say("received")


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "sender":
        send(float(arguments[0]))
    else:
        receive(sys.stdin.readline().strip())
    sys.exit(EXIT_STATUS)
