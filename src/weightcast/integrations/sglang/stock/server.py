"""A stock SGLang server as an engine of a fleet: no code of ours on its side, only its own routes.

What stock SGLang does not do for itself is done here, as far as a client can. SGLang drops names that it does not
know, does not notice what is missing, and may end its process over a wrong shape. Invariants: nothing is sent that the
server's checkpoint does not have in that very shape; before the first byte the server is labelled as incomplete, so
that no answer ever carries a version that is not whole, even if another client resumes the server; a version is its
label only when every bucket was loaded and the session has ended; a server whose weights are of no whole version is not
resumed, and the next complete update heals it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weightcast.errors import IncompleteUpdateError, InstallError, UnsupportedError, WeightcastError, detached
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import InitInfo, Offer, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.sglang.stock.routes import Checksums, ModelInfo, ServerInfo, SglangPause, SglangRoutes
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import ClientSender, EngineClient, SenderContext, ServesTraffic
from weightcast.serving.admission import require_fit

INCOMPLETE = "incomplete, was "
MAX_PARALLEL = 64
"""How many servers are called at once."""
_encode = msgspec.json.encode
logger = logging.getLogger(__name__)


class SglangStockServer(EngineClient, ServesTraffic):
    """The client for one stock server; it brings the sender that all of them share, found or made by `join`."""

    def __init__(
        self,
        routes: SglangRoutes,
        model: ModelInfo,
        server: ServerInfo,
        *,
        pause: SglangPause,
        join: Callable[[SglangStockServer, Sequence[ClientSender], SenderContext], ClientSender],
    ) -> None:
        self.name = routes.name
        self.routes = routes
        self.num_ranks = server.tp_size
        self.is_whole = False
        """Whether the sender has brought every bucket of the update in progress."""
        self.group_name = ""
        """The group that its ranks have joined, if any."""
        self.directory = ""
        """What the server is to load in the install, where the sender writes to disk."""
        self._server = server
        self._pause_mode: SglangPause = pause
        self._join = join
        logger.warning(
            "%s is stock SGLang: each update pauses it for the whole transfer, and has no undo. For a pause of the "
            "install alone, install weightcast beside it (if SGLANG_PLUGINS is set there, it must name weightcast)",
            self.name,
        )
        self._held: Sequence[TensorSpec] | None = reference(model.model_path, revision=None, cache_dir=None)
        """The server's checkpoint, or else (with a warning in the log) the first complete offer."""
        self._label = model.weight_version
        self._run = self._version_run = ""
        self._known_manifest = ""
        self._in_session = False
        self._is_torn = False
        self._checksums: Checksums | None = None

    @property
    def wanted_names(self) -> frozenset[str]:
        """Names that the server's own checkpoint has; of tied tensors each of them is to be sent."""
        return frozenset(spec.name for spec in self._held or ())

    # --- control ---

    def info(self) -> WeightInfo:
        """`weight_version` is SGLang's label. No worker of ours is there to connect a link: `world_size` is 0."""
        label = self.routes.model_info().weight_version
        is_incomplete = label.startswith(INCOMPLETE)
        if label != self._label:
            # Another client has updated the server, or it was started again.
            self._label, self._version_run, self._checksums = label, "", None
            self._is_torn, self._in_session = is_incomplete, False
        return WeightInfo(
            weight_version=label.removeprefix(INCOMPLETE),
            run=self._version_run,
            torn=f"{self.name} holds no whole version" if is_incomplete else "",
            world_size=0,
            abilities=("streaming",),
        )

    def init(self, info: InitInfo) -> None:
        """Stock SGLang knows no holders: two publishers of one server are not kept apart."""
        self._run = info.run

    def update(self, info: UpdateInfo) -> None:
        """An offer is checked here, against what the server's checkpoint has. Seals and aborts need no words.

        Raises IncompatibleWeightsError, UnsupportedError, PeerError.
        """
        if not isinstance(info, Offer):
            return
        if info.undo:
            raise UnsupportedError(
                f"{self.name} is stock SGLang, which keeps no undo copy: publish with undo=False, or install "
                "weightcast beside it (if SGLANG_PLUGINS is set there, it must name weightcast)"
            )
        self.info()
        if info.manifest is not None:
            offered = [record.spec for record in info.manifest.tensors]
            if self._held is None:
                self._held = offered
            require_fit(offered, self._held, can_cast=lambda offered, held: offered == self._server.dtype)
            self._known_manifest = info.manifest_digest
        assert info.manifest_digest == self._known_manifest, "a manifest is left out only if it was accepted before"
        self.is_whole, self.directory = False, ""
        if self._checksums is None and not self._is_torn:
            # While it serves, and not in the pause; after an update they are known.
            self._checksums = self.routes.checksums()

    def sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender:
        return self._join(self, known, context)

    # --- the update, in this order ---

    def pause(self, run: str) -> None:
        self.routes.pause(self._pause_mode)

    def begin(self) -> None:
        """Mark the server, which is paused, as incomplete, and open a session."""
        self._mark()
        self.routes.begin()
        self._in_session = True

    def _mark(self) -> None:
        if not self._is_torn:
            label = f"{INCOMPLETE}{self._label}"
            self._is_torn = True
            self.routes.set_version(label)
            self._label = label

    def finish(self, version: int) -> None:
        """Every bucket was loaded: end the session, and label the weights. It is paused until `resume`.

        Raises IncompleteUpdateError if the sender has not brought everything, InstallError if ranks hold different
        weights.
        """
        if not self.is_whole:
            raise IncompleteUpdateError(f"{self.name} has not got every bucket of version {version}")
        if self.directory:
            self._mark()
            self.routes.load_directory(self.directory)
        self._end_session()
        checksums = self.routes.checksums()
        mixed = _mixed(self._checksums, checksums)
        if mixed:
            raise InstallError(f"{self.name}: its ranks hold different {mixed}: publish again", torn=True)
        self.routes.set_version(str(version))
        self._label, self._version_run = str(version), self._run
        self._is_torn, self._checksums = False, checksums

    def resume(self, run: str) -> None:
        """End the session and have it serve; but not if it holds no whole version."""
        self._end_session()
        if self._is_torn:
            if self._checksums is None or self.routes.checksums() != self._checksums:
                logger.warning("%s stays paused until a complete update heals it: it holds no whole version", self.name)
                return
            # It still holds the former version, unharmed.
            label = self._label.removeprefix(INCOMPLETE)
            self.routes.set_version(label)
            self._label, self._is_torn = label, False
        self.routes.resume()

    def _end_session(self) -> None:
        if self._in_session:
            self.routes.end()
            self._in_session = False

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """End the session; if the weights are those of the former version, say so again and resume, else leave it."""
        headers, label = self.routes.headers, self._label.removeprefix(INCOMPLETE)
        known = "" if self._checksums is None else self._checksums.per_engine_checksum
        # Whatever is not the known checksum.
        other = rf'"per_engine_checksum":\s*"(?!{re.escape(known)}")' if known else "."
        relabel = _encode({"new_version": label, "abort_all_requests": False}).decode()
        return [
            RecoveryRequest(f"{self.name}/end_weight_update", headers, "{}"),
            RecoveryRequest(f"{self.name}/weights_checker", headers, '{"action": "checksum"}', stop_if=other),
            RecoveryRequest(f"{self.name}/update_weight_version", headers, relabel),
            RecoveryRequest(f"{self.name}/continue_generation", headers, '{"torch_empty_cache": false}'),
        ]

    def close(self) -> None:
        """Have the server forget a group that it is still in, and close the connections. Idempotent."""
        self.leave_group()
        self.routes.close()

    def leave_group(self) -> None:
        """Have the server drop its part of the group, if it still answers."""
        name, self.group_name = self.group_name, ""
        if name:
            with contextlib.suppress(WeightcastError):
                self.routes.leave_group(name)


def _mixed(before: Checksums | None, after: Checksums) -> str:
    """A parameter that all ranks held alike before, and not now: one rank has loaded what another has not."""

    def is_alike(checksums: Checksums, name: str) -> bool:
        return len({rank.checksums.get(name) for rank in checksums.ranks}) == 1

    if before is None or len(after.ranks) < 2 or len(before.ranks) != len(after.ranks):
        return ""
    return next(
        (name for name in before.ranks[0].checksums if is_alike(before, name) and not is_alike(after, name)), ""
    )


class Servers:
    """The servers of one update, called all at once. `living` are still in it; `failures` says why others are not."""

    def __init__(self, servers: Iterable[SglangStockServer], pool: ThreadPoolExecutor) -> None:
        self.living = list(servers)
        self.failures: dict[str, WeightcastError] = {}
        self._pool = pool

    def each(self, call: Callable[[SglangStockServer], object]) -> None:
        """Call each that lives, and wait; a server that fails is dropped."""
        calls = [(self._pool.submit(call, server), server) for server in self.living]
        for future, server in calls:
            error = future.exception()
            if error is not None:
                self.failures[server.name] = detached(error)
                self.living = [other for other in self.living if other is not server]
