"""`weightcast plan`: what it prints, its JSON, and what it says of a wrong call."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from weightcast import cli
from weightcast.cli import exits
from weightcast.cli.planned_bytes import Estimate
from weightcast.format.bucket import HEADER_BYTES

FEW = ["plan", "--params", "1e6", "--tensors", "10"]


def test_it_prints_what_was_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FEW, "--engines", "2", "--undo"]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "2.00 MB in 10 tensors, ipc, staged",
        "from 1 host of 1 rank, whole, to 2 engines of 1 worker on the trainer's hosts",
    ]
    assert (cells := cells_of(lines))["buckets"] == "2"
    assert (cells["origins"], cells["for the undo"]) == ("1", "4.00 MB")
    assert not [name for name in cells if "link" in name]


def test_a_link_of_known_speed_has_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FEW, "--transport", "gloo", "--apart", "--link-gbit", "0.016"]) == exits.OK
    cells = cells_of(capsys.readouterr().out.splitlines())
    # 10 tensors of 200,192 bytes, and the headers of two buckets, at 2 MB/s.
    assert cells["trainer host's link"] == cells["engine host's link"] == "1.001 s"


ON_ONE_HOST = """\
60.0 GB in 18,867 tensors, ipc, staged
from 1 host of 1 rank, whole, to 8 engines of 1 worker on the trainer's hosts

┏━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ counted               ┃   value ┃                                ┃
┡━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│ buckets               │     899 │ of at most 67.1 MB             │
│ origins               │       1 │ 60.0 GB in all                 │
│ trainer host's memory │ 60.0 GB │ all buckets                    │
│ engine host's memory  │ 0 bytes │ the trainer's is read in place │
└───────────────────────┴─────────┴────────────────────────────────┘
"""


def test_all_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--params", "30e9", "--tensors", "18867", "--engines", "8"]) == exits.OK
    assert capsys.readouterr().out == ON_ONE_HOST


def cells_of(lines: list[str]) -> dict[str, str]:
    """The table's first two columns."""
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    return {row[0]: row[1] for row in rows if row[1:]}


def test_the_json_is_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--transport", "gloo", "--apart", "--engines", "4", "--engine-hosts", "2"]
    assert cli.main([*FEW, *argv, "--bucket-size-mib", "4", "--json"]) == exits.OK
    found = msgspec.json.decode(capsys.readouterr().out, type=Estimate)
    assert (found.num_tensors, found.num_bytes, found.num_buckets, found.members) == (10, 2_000_000, 1, 5)
    # 100,000 elements of 2 bytes each, aligned to 256.
    wire = 10 * 200_192 + HEADER_BYTES
    assert found.origins == [wire]
    # The trainer sends to members 1, 2 and 4; of these, 1 and 2 are on the first engine host with 3 and 4 on the other.
    assert (found.trainer_host.sent, found.engine_host.sent) == (3 * wire, wire)


def test_a_directory_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", "--config", str(tmp_path), "--dtype", "float32", "--json"]) == exits.OK
    found = json.loads(capsys.readouterr().out)
    # Embedding, final norm, and of the layer: q, k, v, o, two norms of heads, three of the MLP, two norms.
    assert found["num_tensors"] == 13
    assert found["num_bytes"] == 4 * (64 * 32 + 32 + 32 * 32 * 2 + 2 * 16 * 32 + 2 * 16 + 3 * 64 * 32 + 2 * 32)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*FEW, "--engine-hosts", "2", "--apart"], "use --transport gloo, nccl or file"),
        (["plan", "--params", "5", "--tensors", "10"], "--params 5 can't fill --tensors 10"),
        (["plan", "--params", "1e18", "--tensors", "10000000"], "--tensors is 10000000; it must be at most 1048576"),
        (["plan", "--config", "no/such/directory"], "no/such/directory has no config.json"),
    ],
)
def test_a_wrong_plan_is_one_line_with_the_remedy(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == exits.USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith("weightcast: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--params", "many"],
        ["plan"],
        ["plan", "--params", "1e6", "--config", "."],
        [*FEW, "--link-gbit", "-1"],
        [*FEW, "--engines", "0"],
        [*FEW, "--sharding", "zero"],
    ],
)
def test_an_option_out_of_range_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == exits.USAGE
    assert "usage: weightcast" in capsys.readouterr().err
