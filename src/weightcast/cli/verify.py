"""`weightcast verify`: compare an engine with a checkpoint, tensor by tensor, or check that a store is intact."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import partial

import msgspec

from weightcast.cli import exits, output, values
from weightcast.errors import ControlError, UnsupportedError, listed
from weightcast.format.amounts import count, size
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights
from weightcast.host.deadline import LOAD_SECONDS, in_background, to_its_end
from weightcast.seams.source import Source
from weightcast.store.address import StoreAddress

EPILOG = """
examples:
  weightcast verify ./checkpoint --engine http://127.0.0.1:8000
  weightcast verify ./checkpoint --engine http://127.0.0.1:8000 --json
  weightcast verify file:///mnt/weights
  weightcast verify file:///mnt/weights --engine http://127.0.0.1:8000

Both sides compute a digest of each tensor's elements as stored, so an engine with another dtype differs. vLLM and
SGLang with weightcast's plugin can be compared once weightcast has installed a version; tensors whose live memory
can't be read back are listed as not proven. An engine reads 64 MiB at a time and generates in between; for a busy
engine, limit the rate with --bandwidth. In a store's newest version the header and digest of every bucket are checked.
"""

_MEANING = {
    "differs": "differs",
    "missing": "is missing in the engine",
    "unknown": "is not in the checkpoint",
}


class Difference(msgspec.Struct, frozen=True):
    """A tensor that differs. `what`: "differs" (values, dtype or shape), "missing" in the engine, or "unknown" to the
    checkpoint."""

    name: str
    what: str
    checkpoint: str = ""
    engine: str = ""


class EngineVerdict(msgspec.Struct, frozen=True):
    """Result for one engine, which has the checkpoint's weights if there are no differences.

    `unproven`: see HeldWeights.
    """

    engine: str
    weight_version: str
    differences: list[Difference]
    unproven: dict[str, str] = {}


class Verdict(msgspec.Struct, frozen=True):
    """The JSON output of `verify`: `ok` if no engine differs. For a damaged store an error is printed instead."""

    ok: bool
    num_tensors: int
    num_bytes: int
    engines: list[EngineVerdict]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, values.integer(1)
    add("checkpoint", metavar="CHECKPOINT", help="a directory of safetensors files, file:///dir or s3://bucket/prefix")
    output.add_engines(parser, required=False)
    add(
        "--bandwidth",
        type=positive,
        metavar="BYTES",
        help="limit, in bytes per second, for reading an engine's weights",
    )
    quarantine_help = "have an engine that differs refuse to serve until a complete update"
    add("--quarantine", action="store_true", help=quarantine_help)
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.engines:
        from weightcast.sources.safetensors import SafetensorsSource
        from weightcast.sources.store import StoreSource

        is_store, token = values.is_store(args.checkpoint), output.read_token(args.token_file)
        source: Source = StoreSource(args.checkpoint) if is_store else SafetensorsSource(args.checkpoint)
        verdict = verify(source, args.engines, token, bandwidth=args.bandwidth, quarantine=args.quarantine)
    elif values.is_store(args.checkpoint):
        verdict = _verify_store(args.checkpoint)
    else:
        args.usage_error("at least one --engine is required, unless a store is verified")
    output.show(verdict, args.json, _view(verdict))
    return exits.OK if verdict.ok else exits.NEGATIVE


def compare(checkpoint: HeldWeights, engine: HeldWeights) -> list[Difference]:
    """Return every tensor that differs. Tensors match by any of their names; tied ones have several."""
    by_name: dict[str, list[TensorSpec]] = {}
    for spec in engine.tensors:
        for name in spec.names:
            by_name.setdefault(name, []).append(spec)
    named = {name for spec in checkpoint.tensors for name in spec.names}
    matched: set[str] = set()
    found: list[Difference] = []
    for spec in checkpoint.tensors:
        others = {other.name: other for name in spec.names for other in by_name.get(name, ())}
        matched |= others.keys()
        if not others:
            found.append(Difference(spec.name, "missing", checkpoint=_described(checkpoint, spec)))
        for other in others.values():
            ours, theirs = _described(checkpoint, spec), _described(engine, other)
            if other.name not in engine.unproven and ours != theirs:
                name = spec.name if other.name in named else other.name
                found.append(Difference(name, "differs", checkpoint=ours, engine=theirs))
    strangers = (spec for spec in engine.tensors if spec.name not in matched)
    return found + [Difference(spec.name, "unknown", engine=_described(engine, spec)) for spec in strangers]


def _described(held: HeldWeights, spec: TensorSpec) -> str:
    if spec.name in held.differing:
        return held.differing[spec.name]
    return f"{spec.dtype}{list(spec.shape)} {held.digests.get(spec.name, 'no digest')}"


def _verify_store(url: str) -> Verdict:
    """Read every bucket of the newest version. Memory: one bucket. Raises IntegrityError if it is damaged."""
    from weightcast.store.reading import pinned

    with pinned(StoreAddress.parse(url), label="weightcast verify") as version:
        manifest = version.manifest
        total_bytes = sum(manifest.buckets)
        with output.measured("store") as show:
            for _, done_bytes in zip(version.payloads(), itertools.accumulate(manifest.buckets), strict=True):
                show(done_bytes, total_bytes)
        return Verdict(True, len(manifest.tensors), manifest.num_bytes, [])


def verify(
    source: Source,
    engines: Sequence[str],
    token: str | None,
    *,
    timeout_seconds: float = LOAD_SECONDS,
    bandwidth: int | None = None,
    quarantine: bool = False,
) -> Verdict:
    """Compare a source's whole tensors with each engine's weights. `timeout_seconds`: limit of each reply.

    `bandwidth`: limit, in bytes per second, for an engine's reading. `quarantine`: engines that differ then refuse to
    serve. Raises UnsupportedError for an engine whose tensors can't be compared, PeerError, ControlError for an engine
    that changes its version meanwhile.
    """
    from weightcast.format.tensor_digest import tensor_digest

    asked = {
        in_background(partial(_ask, url, token, timeout_seconds, bandwidth), name="weightcast-verify"): url
        for url in engines
    }  # the engines compute their digests meanwhile
    specs, regions = source.specs(), source.regions()
    num_bytes, done_bytes, digests = sum(spec.num_bytes for spec in specs), 0, {}
    with output.measured("checkpoint") as show:
        for spec in specs:
            ((_, tensor),) = regions[spec.name]
            digests[spec.name] = tensor_digest(tensor)
            done_bytes += spec.num_bytes
            show(done_bytes, num_bytes)
    ours = HeldWeights("", "", list(specs), digests)
    verdicts: dict[str, EngineVerdict] = {}
    errors: list[Exception] = []
    with output.stage("waiting for the engines"):
        # In the order of their answers, so that an engine that differs is quarantined before others have answered.
        for answer in as_completed(asked):
            url = asked[answer]
            judge = partial(_verdict, url, answer.result, ours, token, quarantine=quarantine)
            try:
                verdicts[url] = to_its_end(judge, name="weightcast-verify")
            except Exception as exc:
                errors.append(exc)
    if errors:
        raise errors[0]
    found = [verdicts[url] for url in engines]
    return Verdict(not any(verdict.differences for verdict in found), len(specs), num_bytes, found)


def _verdict(
    url: str, answer: Callable[[], HeldWeights], ours: HeldWeights, token: str | None, *, quarantine: bool
) -> EngineVerdict:
    from weightcast.control.client import HttpEngine

    theirs = answer()
    verdict = EngineVerdict(url, theirs.weight_version, compare(ours, theirs), theirs.unproven)
    if not (verdict.differences and quarantine):
        return verdict
    names = listed([repr(difference.name) for difference in verdict.differences], separator=", ")
    with contextlib.closing(HttpEngine(url, token=token)) as engine:
        now = engine.connect().info().weight_version
        if now != verdict.weight_version:
            change = f"from version {verdict.weight_version}, which differs, to {now}"
            raise ControlError(f"{url} changed {change} before it could be quarantined: verify it again", peer=url)
        engine.quarantine(f"it was compared with a checkpoint and differs in {names}")
    return verdict


def _ask(url: str, token: str | None, timeout_seconds: float, bandwidth: int | None) -> HeldWeights:
    """Return what the engine has. Raises UnsupportedError, or ControlError if they change meanwhile."""
    from weightcast.control.client import HttpEngine

    with contextlib.closing(HttpEngine(url, token=token, timeout_seconds=timeout_seconds)) as engine:
        engine.connect()
        held = engine.held(bytes_per_second=bandwidth)
        if held is None or (held.unproven and not held.digests):
            raise UnsupportedError(
                f"{url} reports no digests of its weights, so it can't be compared with a checkpoint: for vLLM and "
                "SGLang, install weightcast's plugin and publish a version first; `weightcast inspect` shows the "
                "present version"
            )
    return held


def _view(verdict: Verdict) -> Iterator[str]:
    amount = f"{count(verdict.num_tensors, 'tensor')}, {size(verdict.num_bytes)}"
    if not verdict.engines:
        yield f"every digest of the store's newest version is right: {amount}"
    for engine in verdict.engines:
        who = f"{engine.engine} (version {engine.weight_version})"
        if engine.unproven:
            yield f"{who} can't prove what it holds of {count(len(engine.unproven), 'tensor')}:"
            yield from (f"  {name}: {reason}" for name, reason in engine.unproven.items())
        if not engine.differences:
            yield f"{who} holds exactly this checkpoint{' but for these' * bool(engine.unproven)}: {amount}"
            continue
        yield f"{who} does not hold this checkpoint: {count(len(engine.differences), 'difference')} in {amount}"
        for difference in engine.differences:
            sides = {"checkpoint": difference.checkpoint, "engine": difference.engine}
            found = ", ".join(f"{side} {held}" for side, held in sides.items() if held)
            yield f"  {difference.name} {_MEANING[difference.what]}: {found}"
