"""`weightcast plan`: what it prints, its JSON, and what it says of a wrong call."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from weightcast import cli
from weightcast.bench.cost import Estimate
from weightcast.cli import exits
from weightcast.format.bucket import HEADER_BYTES

PARTS = str(Path(__file__).parents[2] / "bench" / "parts.json")
FEW = ["plan", "--params", "1e6", "--tensors", "10"]


def test_it_prints_what_was_counted_and_calculated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FEW, "--engines", "2", "--undo", "--parts", PARTS]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "2.00 MB in 10 tensors, ipc, staged",
        "from 1 host of 1 rank, whole, to 2 engines of 1 worker on the trainer's hosts",
    ]
    cells = {
        words[0]: words[1] for line in lines if (words := [cell.strip() for cell in line.strip("│").split("│")])[1:]
    }
    assert (cells["buckets"], cells["origins"], cells["for the undo"]) == ("2", "1", "4.00 MB")
    stages = [float(cells[name]) for name in ("gather", "offer", "transfer", "seal", "install")]
    assert float(cells["publish"]) == pytest.approx(sum(stages), abs=0.003)
    assert any("bottleneck: " in line for line in lines)
    assert lines[-1].startswith("parts measured on ")


def test_without_parts_it_says_how_to_get_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(FEW) == exits.OK
    out = capsys.readouterr().out
    assert "run weightcast plan --measure FILE there, then add --parts" in out
    assert "bottleneck" not in out


def test_the_json_is_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--transport", "gloo", "--apart", "--engines", "4", "--engine-hosts", "2", "--link-gbit", "10"]
    assert cli.main([*FEW, *argv, "--bucket-size-mib", "4", "--parts", PARTS, "--json"]) == exits.OK
    found = msgspec.json.decode(capsys.readouterr().out, type=Estimate)
    assert (found.num_tensors, found.num_bytes, found.num_buckets, found.members) == (10, 2_000_000, 1, 5)
    # 100,000 elements of 2 bytes each, aligned to 256.
    wire = 10 * 200_192 + HEADER_BYTES
    assert found.origins == [wire]
    # The trainer sends to members 1, 2 and 4; of these, 1 and 2 are on the first engine host with 3 and 4 on the other.
    assert (found.trainer_host.sent, found.engine_host.sent) == (3 * wire, wire)
    assert set(found.seconds) == {"gather", "offer", "transfer", "seal", "install"}


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
        (["plan"], "there is nothing to plan: add --shapes NAME"),
        ([*FEW, "--ranks-per-host", "8"], "8 trainer ranks hold shards"),
        ([*FEW, "--engine-hosts", "2", "--apart"], "use gloo, nccl or file between hosts"),
        ([*FEW, "--parts", "no/such/file"], "no/such/file has no measured parts"),
        ([*FEW, "--link-gbit", "-1"], "link_gbit is -1.0; it must be a finite number above 0"),
        (["plan", "--params", "5", "--tensors", "10"], "5 parameters can't fill 10 tensors"),
        (["plan", "--params", "1e18", "--tensors", "1e7"], "10000000 tensors; the limit is 1048576"),
        (["plan", "--config", "no/such/directory"], "no/such/directory has no config.json"),
        (["plan", "--measure", "no/such/directory/parts.json"], "is not a directory"),
        (["plan", "--measure", "."], "Is a directory"),
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
        ["plan", "--params", "1.5"],
        ["plan", "--params", "1e6", "--shapes", "qwen3-0.6b"],
        [*FEW, "--engines", "0"],
        [*FEW, "--sharding", "zero"],
    ],
)
def test_an_option_out_of_range_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == exits.USAGE
    assert "usage: weightcast" in capsys.readouterr().err
