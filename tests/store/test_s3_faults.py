"""A proxy before the server spoils requests: a version is whole or not there, and the next publish works."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
from store.object_server import BUCKET, ObjectServer, Proxy, Request, Spoil, environment
from store.store_kit import LONG_SECONDS, OTHER_RUN, RUN, Holder, number_in
from store.test_s3 import number_held, publish, slots, write

from weightcast.errors import IntegrityError, PeerError, StaleVersionError, WeightcastError
from weightcast.serving.follower import Follower
from weightcast.store import objects, reading
from weightcast.store.address import StoreAddress
from weightcast.store.reading import StoreReader
from weightcast.transports.store import StoreSender

pytestmark = pytest.mark.cluster
DEADLINE_SECONDS = 3.0
OBJECTS = {
    "owner": r"writer\.json",
    "manifest": r"slots/\d+/manifest\.json",
    "first bucket": r"slots/\d+/bucket\.0",
    "last bucket": r"slots/\d+/bucket\.5",
    "seal": r"slots/\d+/seal\.json",
    "next": r"next\.json",
    "pointer": r"current\.json",
}
REFUSAL = b'<?xml version="1.0"?><Error><Code>Refused</Code><Message>by the test</Message></Error>'
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with environment(), contextlib.closing(ObjectServer()) as server:
        yield server


class Wire:
    """A store: `through` the proxy, and `straight` to the server."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        prefix = f"s3://{BUCKET}/faults-{next(_numbers)}?endpoint="
        self.through, self.straight = prefix + proxy.endpoint, f"{prefix}http://127.0.0.1:{proxy.target.port}"

    @contextlib.contextmanager
    def spoilt(self, method: str, pattern: str, how: Spoil, *, times: float = float("inf")) -> Iterator[list[str]]:
        """Spoil the first `times` such requests; yield the names of the objects whose requests were spoilt."""
        hit: list[str] = []

        def spoil(request: Request) -> bool:
            key = request.key.partition("/")[2]  # without the prefix
            if request.command != method or not re.fullmatch(pattern, key) or len(hit) >= times:
                return False
            hit.append(key)
            return how(request)

        self.proxy.spoil = spoil
        try:
            yield hit
        finally:
            self.proxy.spoil = lambda request: False


@pytest.fixture
def wire(server: ObjectServer, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(reading, "GRACE_SECONDS", 0.3)
    with contextlib.closing(Proxy(server)) as proxy:
        yield Wire(proxy)


def status(number: int) -> Spoil:
    def answer(request: Request) -> bool:
        request.reply(number, [("Content-Type", "application/xml")], REFUSAL)
        return True

    return answer


def cut_before(request: Request) -> bool:
    """The server never sees the request."""
    request.cut()
    return True


def cut_after(request: Request) -> bool:
    """The server does what was asked, and its answer is lost."""
    request.forward()
    request.cut()
    return True


def torn_answer(request: Request) -> bool:
    """The connection is cut in the middle of the answer's body."""
    number, headers, body = request.forward()
    request.reply(number, headers, body or b"x", most=len(body) // 2)
    return True


def failed_after(request: Request) -> bool:
    """The server does what was asked, and says that it failed."""
    request.forward()
    return status(500)(request)


def twice(request: Request) -> bool:
    """The request arrives twice; the second answer counts."""
    request.forward()
    request.reply(*request.forward())
    return True


SPOILS: dict[str, Spoil] = {
    "403": status(403),
    "500": status(500),
    "503": status(503),
    "cut before": cut_before,
    "cut after": cut_after,
    "torn answer": torn_answer,
    "failed after": failed_after,
    "twice": twice,
}


def table(names: Iterable[str], hows: Iterable[str], diagonal: set[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrize `name` and `how`; what is not on the diagonal runs with --full."""
    return pytest.mark.parametrize(
        ("name", "how"),
        [
            pytest.param(*pair, marks=() if pair in diagonal else pytest.mark.full)
            for pair in itertools.product(names, hows)
        ],
    )


# --- a publish ---

ONCE = {
    ("owner", "cut after"),
    ("manifest", "503"),
    ("first bucket", "403"),
    ("first bucket", "cut before"),
    ("last bucket", "torn answer"),
    ("seal", "twice"),
    ("next", "failed after"),
    ("pointer", "500"),
    ("pointer", "cut before"),
    ("pointer", "cut after"),
    ("pointer", "failed after"),
}


@table(OBJECTS, SPOILS, ONCE)
def test_a_publish_whose_request_is_spoilt_once(wire: Wire, name: str, how: str) -> None:
    """It is tried again, or refused, by the name of the object, if that makes no sense."""
    with contextlib.closing(StoreSender(wire.through, run=RUN, deadline_seconds=LONG_SECONDS)) as sender:
        publish(sender, 1)
        with wire.spoilt("PUT", OBJECTS[name], SPOILS[how], times=1) as hit:
            if how == "403":
                with pytest.raises(PeerError, match=rf"{OBJECTS[name]}.*check the keys"):
                    publish(sender, 2)
                sender.abort("denied")
            else:
                publish(sender, 2)
        assert len(hit) == 1
        assert number_held(wire.straight) == (1 if how == "403" else 2)
        publish(sender, 3)
    assert number_held(wire.straight) == 3


NEVER = {("owner", "403"), ("next", "403"), ("first bucket", "cut before"), ("pointer", "503")}


@table(["owner", "first bucket", "seal", "next", "pointer"], ["403", "503", "cut before"], NEVER)
def test_a_publish_that_can_not_succeed(wire: Wire, name: str, how: str) -> None:
    with contextlib.closing(StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)) as sender:
        publish(sender, 1)
        with wire.spoilt("PUT", OBJECTS[name], SPOILS[how]) as hit:
            remedy = "check the keys" if how == "403" else "check that the server runs|before you publish again"
            with pytest.raises(PeerError, match=rf"{OBJECTS[name]}.*({remedy})"):
                publish(sender, 2)
            sender.abort("it failed")
            assert hit
        assert number_held(wire.straight) == 1
        assert [stored.number for stored in versions(wire)] == [1]
        publish(sender, 3)
    assert number_held(wire.straight) == 3


def versions(wire: Wire) -> list[reading.Stored]:
    return StoreReader(StoreAddress.parse(wire.straight)).complete_versions()


def test_a_commit_that_arrives_long_after_it_was_given_up(wire: Wire) -> None:
    """Each try of it is kept back; the first one then arrives when the publisher has aborted the version."""
    kept: list[Callable[[], object]] = []

    def keep(request: Request) -> bool:
        kept.append(request.forward)
        request.cut()
        return True

    with contextlib.closing(StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)) as sender:
        publish(sender, 1)
        with (
            wire.spoilt("PUT", OBJECTS["pointer"], keep),
            pytest.raises(PeerError, match=r"current\.json could not be replaced within 3 s .*the server may still do"),
        ):
            publish(sender, 2)
        sender.abort("unknown")
        assert number_held(wire.straight) == 1
        kept[0]()
        assert number_held(wire.straight) == 2, "whole, since nothing of it was removed"
        with pytest.raises(StaleVersionError, match=r"current\.json was changed"):
            publish(sender, 3)
    write(wire.straight, 3)
    kept[0]()
    assert number_held(wire.straight) == 3, "its condition does not hold any more"


@pytest.mark.parametrize("next_run", [RUN, OTHER_RUN], ids=["the same publisher", "another one"])
def test_a_version_that_was_not_committed_is_never_found_later(wire: Wire, next_run: str) -> None:
    with contextlib.closing(StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)) as sender:
        publish(sender, 1)
        with wire.spoilt("PUT", OBJECTS["pointer"], cut_before), pytest.raises(PeerError, match="not be replaced"):
            publish(sender, 2)
        sender.abort("unknown")
        if next_run == RUN:
            publish(sender, 3)
    if next_run == OTHER_RUN:
        write(wire.straight, 3, run=next_run)
    assert [stored.number for stored in versions(wire)] == [3, 1]


def test_a_version_whose_commit_was_taken_for_lost_is_found_later(wire: Wire) -> None:
    with contextlib.closing(StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)) as sender:
        publish(sender, 1)

        is_done = False

        def lose(request: Request) -> bool:
            nonlocal is_done
            if not request.key.endswith("/current.json") or not (is_done or request.command == "PUT"):
                return False
            is_done = True
            return cut_after(request)

        wire.proxy.spoil = lose
        with pytest.raises(PeerError):
            publish(sender, 2)
        wire.proxy.spoil = lambda request: False
        sender.abort("unknown")
        assert number_held(wire.straight) == 2
        publish(sender, 3)
    assert [stored.number for stored in versions(wire)] == [3, 2, 1]


def test_a_bucket_that_arrives_when_others_have_published(wire: Wire) -> None:
    """A publisher has died; what it had sent arrives later, and hits no version."""
    kept: list[Callable[[], object]] = []

    def keep(request: Request) -> bool:
        kept.append(request.forward)
        request.cut()
        return True

    sender = StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)
    with contextlib.closing(sender):
        with wire.spoilt("PUT", OBJECTS["first bucket"], keep), pytest.raises(PeerError, match=r"bucket\.0"):
            publish(sender, 1)
        write(wire.straight, 2, run="ab" * 16)
        for late in kept:
            late()
        assert number_held(wire.straight) == 2
    write(wire.straight, 3)
    assert number_held(wire.straight) == 3
    assert len(slots(wire.straight)) == 2, "what arrived late was removed"


# --- a reader ---


def flipped(request: Request) -> bool:
    number, headers, body = request.forward()
    request.reply(number, headers, body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
    return True


def shortened(request: Request) -> bool:
    """The answer is complete by its headers, and lacks its end."""
    number, headers, body = request.forward()
    kept = [(name, value) for name, value in headers if name.lower() != "content-range"]
    size = [("Content-Range", f"bytes 0-{len(body) - 9}/{len(body) - 8}")] if len(kept) < len(headers) else []
    request.reply(number, kept + size, body[:-8])
    return True


READ_SPOILS = {**{name: SPOILS[name] for name in ("403", "503", "cut before", "torn answer")}}
READ_SPOILS |= {"404": status(404), "flipped": flipped, "shortened": shortened}
READ = ["pointer", "seal", "manifest", "first bucket", "last bucket"]


KEPT = {
    ("pointer", "403"),
    ("pointer", "404"),
    ("seal", "404"),
    ("seal", "flipped"),
    ("manifest", "flipped"),
    ("first bucket", "shortened"),
    ("first bucket", "503"),
    ("last bucket", "404"),
    ("last bucket", "flipped"),
    ("last bucket", "torn answer"),
}


@table(READ, READ_SPOILS, KEPT)
def test_a_reader_keeps_its_version_while_its_requests_are_spoilt(wire: Wire, name: str, how: str) -> None:
    engine = Holder()
    with contextlib.closing(StoreSender(wire.straight, run=RUN, deadline_seconds=LONG_SECONDS)) as sender:
        publish(sender, 1)
        with Follower(wire.through, engine, install_deadline_seconds=DEADLINE_SECONDS) as follower:
            assert follower.poll() is not None
            publish(sender, 2)
            late = Follower(wire.through, Holder(), install_deadline_seconds=DEADLINE_SECONDS)
            with late, wire.spoilt("GET", OBJECTS[name], READ_SPOILS[how]) as hit:
                if (how, name) == ("404", "pointer"):
                    assert late.poll() is None, "an empty store"
                else:
                    with pytest.raises((IntegrityError, PeerError)) as caught:
                        late.poll()
                    named = OBJECTS[name] + r"|bucket [05]:|slots/2 has no whole version, expected version 2"
                    assert re.search(named, str(caught.value)), caught.value
                    assert hit
                if name != "manifest":  # which it has already
                    with contextlib.suppress(WeightcastError):
                        follower.poll()
                assert number_in(engine.held) == 1
            assert follower.poll().version == 2  # type: ignore[union-attr]
            assert number_in(engine.held) == 2


PASSES = {("pointer", "503"), ("seal", "cut before"), ("manifest", "twice"), ("last bucket", "torn answer")}


@table(READ, ["503", "cut before", "torn answer", "twice"], PASSES)
def test_a_reader_overcomes_what_passes(wire: Wire, name: str, how: str) -> None:
    write(wire.straight, 1)
    engine = Holder()
    with (
        Follower(wire.through, engine, install_deadline_seconds=LONG_SECONDS) as follower,
        wire.spoilt("GET", OBJECTS[name], SPOILS[how], times=1) as hit,
    ):
        assert follower.poll().version == 1  # type: ignore[union-attr]
    assert number_in(engine.held) == 1
    assert hit


@pytest.mark.parametrize("name", ["pointer", "seal", "first bucket"])
def test_a_reader_of_answers_of_former_times_gets_no_mix(wire: Wire, name: str) -> None:
    """The server is consistent only eventually: of one object it first shows what was there before."""
    engine, old = Holder(), dict[str, tuple[int, list[tuple[str, str]], bytes]]()

    def remember(request: Request) -> bool:
        answer = old[request.key.rpartition("/")[2]] = request.forward()
        request.reply(*answer)
        return True

    def recall(request: Request) -> bool:
        request.reply(*old[request.key.rpartition("/")[2]])
        return True

    with contextlib.closing(StoreSender(wire.straight, run=RUN, deadline_seconds=LONG_SECONDS)) as sender:
        publish(sender, 1)
        with Follower(wire.through, engine, install_deadline_seconds=DEADLINE_SECONDS) as follower:
            with wire.spoilt("GET", OBJECTS[name], remember):
                assert follower.poll() is not None
            publish(sender, 2)
            with wire.spoilt("GET", OBJECTS[name], recall):
                if name == "pointer":
                    assert follower.poll() is None
                else:
                    with pytest.raises(IntegrityError, match="version 1"):
                        follower.poll()
                assert number_in(engine.held) == 1
            assert follower.poll().version == 2  # type: ignore[union-attr]
            assert number_in(engine.held) == 2


# --- the server ---


def test_a_server_that_is_killed_while_a_version_is_written_and_read(leaves_nothing: None) -> None:
    """Nothing hangs; the engine serves on, and a server in its place is written and read by the next ones."""
    engine = Holder()
    with environment(), contextlib.closing(ObjectServer()) as server, contextlib.closing(Proxy(server)) as proxy:
        wire = Wire(proxy)
        sender = StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)
        follower = Follower(wire.through, engine, install_deadline_seconds=DEADLINE_SECONDS)
        with contextlib.closing(sender), follower:
            publish(sender, 1)
            assert follower.poll() is not None
            publish(sender, 2)

            def kill(request: Request) -> bool:
                server.close()
                request.cut()
                return True

            with wire.spoilt("GET", OBJECTS["last bucket"], kill, times=1), pytest.raises(PeerError, match=r"bucket\."):
                follower.poll()
            assert number_in(engine.held) == 1
            with pytest.raises(PeerError, match="check that the server runs"):
                publish(sender, 3)
            sender.abort("the server is gone")


def test_a_server_that_does_not_answer_is_given_up(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "GRACE_SECONDS", 2.0)
    go_on = threading.Event()

    def wait(request: Request) -> bool:
        go_on.wait(LONG_SECONDS)
        request.cut()
        return True

    with contextlib.closing(StoreSender(wire.through, run=RUN, deadline_seconds=DEADLINE_SECONDS)) as sender:
        publish(sender, 1)
        try:
            with wire.spoilt("PUT", OBJECTS["last bucket"], wait), pytest.raises(PeerError, match=r"bucket\.5"):
                publish(sender, 2)
        finally:
            go_on.set()
        sender.abort("it failed")
        assert number_held(wire.straight) == 1
        publish(sender, 3)
    assert number_held(wire.straight) == 3
