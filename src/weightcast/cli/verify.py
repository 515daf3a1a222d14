"""`weightcast verify`: does the engine hold exactly this checkpoint, tensor by tensor; is a store whole?"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec

from weightcast.cli import exits, output, values
from weightcast.errors import ControlError, UnsupportedError
from weightcast.format.amounts import count, size
from weightcast.format.manifest import TensorSpec
from weightcast.host.deadline import in_background
from weightcast.seams.source import Source
from weightcast.store.address import StoreAddress

EPILOG = """
examples:
  weightcast verify ./checkpoint --engine http://127.0.0.1:8000
  weightcast verify ./checkpoint --engine http://127.0.0.1:8000 --json
  weightcast verify file:///mnt/weights
  weightcast verify file:///mnt/weights --engine http://127.0.0.1:8000

A digest of each tensor's elements as they are stored is computed on both sides: an engine that casts to another dtype
does not hold this checkpoint, and differs. In a store's newest version every bucket's header and digest is checked.
"""

ENGINE_TIMEOUT_SECONDS = 600.0
_MEANING = {
    "differs": "differs",
    "missing": "is missing in the engine",
    "unknown": "is not in the checkpoint",
}


class Holding(msgspec.Struct, frozen=True):
    """The tensors of an engine or a checkpoint: specs, and each one's digest by its first name."""

    specs: Sequence[TensorSpec]
    digests: Mapping[str, str]

    def describe(self, spec: TensorSpec) -> str:
        return f"{spec.dtype}{list(spec.shape)} {self.digests.get(spec.name, 'no digest')}"


class Difference(msgspec.Struct, frozen=True):
    """`what`: "differs" (values, dtype or shape), "missing" in the engine, or "unknown" to the checkpoint."""

    name: str
    what: str
    checkpoint: str = ""
    engine: str = ""


class EngineVerdict(msgspec.Struct, frozen=True):
    """One engine; it holds the checkpoint if there are no differences."""

    engine: str
    weight_version: str
    differences: list[Difference]


class Verdict(msgspec.Struct, frozen=True):
    """The JSON of `verify`: `ok` if no engine differs. A store that is not whole is an error instead."""

    ok: bool
    num_tensors: int
    num_bytes: int
    engines: list[EngineVerdict]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory of safetensors files, or file:///dir")
    output.add_engines(parser, required=False)
    parser.set_defaults(usage_error=parser.error)
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.engines:
        from weightcast.sources.safetensors import SafetensorsSource
        from weightcast.sources.store import StoreSource

        is_store, token = values.is_store(args.checkpoint), output.read_token(args.token_file)
        source: Source = StoreSource(args.checkpoint) if is_store else SafetensorsSource(args.checkpoint)
        verdict = verify(source, args.engines, token)
    elif values.is_store(args.checkpoint):
        verdict = _verify_store(args.checkpoint)
    else:
        args.usage_error("one --engine at least is required, unless a store is to be verified")
    output.show(verdict, args.json, lambda: _view(verdict))
    return exits.OK if verdict.ok else exits.NEGATIVE


def compare(checkpoint: Holding, engine: Holding) -> list[Difference]:
    """Every tensor in which the two differ. Tensors are matched by any of their names; tied ones have several."""
    by_name = {name: spec for spec in engine.specs for name in spec.names}
    matched: set[str] = set()
    found: list[Difference] = []
    for spec in checkpoint.specs:
        others = {by_name[name].name: by_name[name] for name in spec.names if name in by_name}
        matched |= others.keys()
        if not others:
            found.append(Difference(spec.name, "missing", checkpoint=checkpoint.describe(spec)))
        for other in others.values():
            ours, theirs = checkpoint.describe(spec), engine.describe(other)
            if ours != theirs:
                found.append(Difference(spec.name, "differs", checkpoint=ours, engine=theirs))
    strangers = (spec for spec in engine.specs if spec.name not in matched)
    return found + [Difference(spec.name, "unknown", engine=engine.describe(spec)) for spec in strangers]


def _verify_store(url: str) -> Verdict:
    """Read every bucket of the newest version, in the memory of one. Raises IntegrityError if it is not whole."""
    from weightcast.store.reading import pinned

    with pinned(StoreAddress.parse(url).directory, label="weightcast verify") as version:
        manifest = version.manifest
        with output.counted("store", sum(manifest.buckets)) as step:
            for _, num_bytes in zip(version.payloads(), manifest.buckets, strict=True):
                step(num_bytes)
        return Verdict(True, len(manifest.tensors), manifest.num_bytes, [])


def verify(
    source: Source, engines: Sequence[str], token: str | None, *, timeout_seconds: float = ENGINE_TIMEOUT_SECONDS
) -> Verdict:
    """Compare what a source has, whole tensors, with what each engine holds; each of its answers by that time.

    Raises UnsupportedError for an engine that does not list its tensors, PeerError.
    """
    from weightcast.format.tensor_digest import tensor_digest

    asked = [
        in_background(partial(_ask, url, token, timeout_seconds), name="weightcast-verify") for url in engines
    ]  # they compute while we do
    specs, regions = source.specs(), source.regions()
    num_bytes, digests = sum(spec.num_bytes for spec in specs), {}
    with output.counted("checkpoint", num_bytes) as step:
        for spec in specs:
            ((_, tensor),) = regions[spec.name]
            digests[spec.name] = tensor_digest(tensor)
            step(spec.num_bytes)
    verdicts, ours = [], Holding(specs, digests)
    with output.stage("waiting for the engines"):
        for url, answer in zip(engines, asked, strict=True):
            weight_version, theirs = answer.result()
            verdicts.append(EngineVerdict(url, weight_version, compare(ours, theirs)))
    return Verdict(not any(verdict.differences for verdict in verdicts), len(specs), num_bytes, verdicts)


def _ask(url: str, token: str | None, timeout_seconds: float) -> tuple[str, Holding]:
    """The engine's version and what it holds. Raises ControlError if the version changed meanwhile."""
    from weightcast.control.client import HttpEngine

    with contextlib.closing(HttpEngine(url, token=token, timeout_seconds=timeout_seconds)) as engine:
        before = engine.connect().info()
        if "inspect" not in before.abilities:
            raise UnsupportedError(
                f"{url} does not list its tensors (vLLM's and SGLang's servers don't), so it can't be compared with a "
                "checkpoint; `weightcast inspect` shows its version"
            )
        held = Holding(engine.specs(), engine.digests())
        after = engine.info()
    if (before.run, before.weight_version) != (after.run, after.weight_version):
        change = f"from version {before.weight_version} to {after.weight_version}"
        raise ControlError(f"{url} went {change} while it was read: verify again", peer=url)
    return after.weight_version, held


def _view(verdict: Verdict) -> Iterator[str]:
    amount = f"{count(verdict.num_tensors, 'tensor')}, {size(verdict.num_bytes)}"
    if not verdict.engines:
        yield f"every digest of the store's newest version is right: {amount}"
    for engine in verdict.engines:
        who = f"{engine.engine} (version {engine.weight_version})"
        if not engine.differences:
            yield f"{who} holds exactly this checkpoint: {amount}"
            continue
        yield f"{who} does not hold this checkpoint: {count(len(engine.differences), 'difference')} in {amount}"
        for difference in engine.differences:
            sides = {"checkpoint": difference.checkpoint, "engine": difference.engine}
            found = ", ".join(f"{side} {held}" for side, held in sides.items() if held)
            yield f"  {difference.name} {_MEANING[difference.what]}: {found}"
