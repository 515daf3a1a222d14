"""Transports by URL: the known ones resolve, third parties can add one, a wrong URL is answered with what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightcast import ModuleSource, Publisher, TensorSource, registry
from weightcast.seams.transport import Transport
from weightcast.store.address import SCHEMES


@pytest.mark.parametrize("name", sorted(registry.TRANSPORTS))
def test_every_transport_of_the_table_is_one(name: str) -> None:
    found = registry.transport(f"{name}://")
    assert isinstance(found, Transport)
    assert found.default_bucket_size_bytes["cpu"] > 0


@pytest.mark.parametrize("url", ["", "ipc", "ipc:", "ipc:/", "://x", "//x"])
def test_what_is_no_url_is_the_callers_mistake(url: str) -> None:
    known = "file://, gloo://, ipc://, memory://, nccl://, s3://"
    with pytest.raises(ValueError, match=f"is not a transport URL; write one like {known}"):
        registry.transport(url)


@pytest.mark.parametrize("url", ["gloo://::1:0", "gloo://::1", "nccl://fe80::1:29500/secret"])
def test_an_ipv6_address_needs_brackets(url: str) -> None:
    remedy = r"has an IPv6 address without brackets: write one like '(gloo|nccl)://\[::1\]:0'"
    with pytest.raises(ValueError, match=remedy):
        Publisher(TensorSource({"a": torch.zeros(1)}), transport=url)


def test_an_unknown_scheme_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no transport 'carrier-pigeon'; known here: file, gloo, ipc, memory, nccl"):
        registry.transport("carrier-pigeon://coop")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, points: str) -> None:
    """A distribution with these entry points, as pip would leave it."""
    (folder / "pigeon.py").write_text("TRANSPORT = 'coo'\n")
    info = folder / "pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{points}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_third_party_adds_a_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "pigeon = pigeon:TRANSPORT")
    assert registry.transport("pigeon://coop") == "coo"
    assert "pigeon" in registry.registered_schemes()


def test_a_third_party_cannot_take_a_name_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "ipc = pigeon:TRANSPORT")
    assert registry.transport("ipc://") != "coo"


@pytest.mark.parametrize(
    ("url", "host"), [("ipc://", "127.0.0.1"), ("gloo://10.0.0.1:29500", "10.0.0.1"), ("nccl://[::1]:1", "::1")]
)
def test_host(url: str, host: str) -> None:
    assert registry.host(url) == host


def test_what_keeps_versions_can_be_read_back(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    model = torch.nn.Linear(2, 3)
    with Publisher(ModuleSource(model), transport=url) as publisher:
        number = publisher.publish().version
    kept = registry.stored_source(url)
    assert (kept.version.number, [spec.name for spec in kept.specs()]) == (number, ["weight", "bias"])
    stored = [name for name in (*registry.TRANSPORTS, *registry.READ_ONLY) if registry.is_stored(f"{name}://")]
    assert stored == ["file", "s3", "store+http", "store+https"] == list(SCHEMES)
