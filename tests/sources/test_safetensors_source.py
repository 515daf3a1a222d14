"""SafetensorsSource: real checkpoints, zero copy, and one clear error for each way a directory can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightcast.checkpoint.files import INDEX_FILE, SINGLE_FILE
from weightcast.errors import ClosedError
from weightcast.format.geometry import whole
from weightcast.sources.safetensors import SafetensorsSource

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "odd": torch.tensor([True, False, True]),
    "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "fp4": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "complex": torch.tensor([1 + 2j]),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = sorted(TENSORS)
    write_shards(tmp_path, [{n: TENSORS[n] for n in names[:3]}, {n: TENSORS[n] for n in names[3:]}])
    return tmp_path


def check(source: SafetensorsSource) -> None:
    specs, regions = {spec.name: spec for spec in source.specs()}, source.regions()
    assert specs.keys() == regions.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        ((region, view),) = regions[name]
        assert specs[name].shape == tuple(tensor.shape)
        assert specs[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert region == whole(tensor.shape)
        assert view.dtype == tensor.dtype
        assert bits(view) == bits(tensor)
    assert source.specs() is source.specs()
    assert source.regions() is regions


def test_a_single_file_directory(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    with SafetensorsSource(tmp_path) as source:
        check(source)


def test_with_a_dtype_the_specs_change_and_the_views_stay(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    with SafetensorsSource(tmp_path, dtype=torch.float32) as source:
        dtypes, regions = {spec.name: spec.dtype for spec in source.specs()}, source.regions()
    stay = TENSORS.keys() - {"matrix", "empty"}
    assert (dtypes["matrix"], dtypes["empty"]) == ("float32", "float32")
    assert {name: dtypes[name] for name in stay} == {n: str(TENSORS[n].dtype).removeprefix("torch.") for n in stay}
    assert all(regions[name][0][1].dtype == tensor.dtype for name, tensor in TENSORS.items())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_weights_are_not_cast_to(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"it must be torch\.bfloat16"):
        SafetensorsSource(tmp_path, dtype=dtype)


def test_a_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    with SafetensorsSource(str(tmp_path / "weights.safetensors")) as source:
        check(source)


def test_a_directory_with_one_file_of_another_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    with SafetensorsSource(tmp_path) as source:
        check(source)


def test_shards(sharded: Path) -> None:
    with SafetensorsSource(sharded) as source:
        check(source)


def test_values_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    num_bytes = 64 << 20
    save_file({"big": torch.ones(num_bytes, dtype=torch.uint8)}, tmp_path / SINGLE_FILE)
    before = private_bytes()
    with SafetensorsSource(tmp_path) as source:
        assert source.regions()["big"][0][1].sum() == num_bytes
        assert private_bytes() - before < num_bytes // 2


def private_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096


def test_what_save_pretrained_wrote_in_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with SafetensorsSource(tmp_path) as source:
        assert all(torch.equal(source.regions()[name][0][1], t) for name, t in model.state_dict().items())


def test_a_closed_source_says_so(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    kept = source.regions()["matrix"][0][1]
    source.close()
    source.close()
    assert torch.equal(kept, TENSORS["matrix"])
    with pytest.raises(ClosedError, match="make a new one"):
        source.specs()
    with pytest.raises(ClosedError, match="make a new one"):
        source.regions()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a directory nor a file"):
        SafetensorsSource(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)


def test_no_tensors(tmp_path: Path) -> None:
    write_index(tmp_path, {})
    with pytest.raises(ValueError, match="has no tensors"):
        SafetensorsSource(tmp_path)


def test_many_files_without_an_index(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="2 safetensors files but no"):
        SafetensorsSource(tmp_path)


def test_missing_shards(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 1 of 2 shards .* model-00002-of-00002"):
        SafetensorsSource(sharded)


def test_a_name_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(ValueError, match=r"'b' is in .*00001-of-00002.* and in .*00002-of-00002"):
        SafetensorsSource(tmp_path)


def test_a_name_that_only_the_index_has(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, [{"a": torch.ones(1)}])
    write_index(tmp_path, {**weight_map, "ghost": weight_map["a"]})
    with pytest.raises(ValueError, match=r"1 tensors .* in no shard: ghost"):
        SafetensorsSource(tmp_path)


def test_an_index_may_not_point_elsewhere(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    write_index(inside, {"a": "../outside.safetensors"})
    with pytest.raises(ValueError, match="outside its directory"):
        SafetensorsSource(inside)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "\xff", "[" * 100_000])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="is not an index with a weight_map"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "not-a-header", "huge-header"])
def test_a_broken_file(tmp_path: Path, damage: str) -> None:
    file = tmp_path / SINGLE_FILE
    save_file({"a": torch.ones(1000)}, file)
    data = file.read_bytes()
    broken = {
        "empty": b"",
        "truncated": data[:-10],
        "not-a-header": data[:8] + b"[" + data[9:],
        "huge-header": b"\xff" * 8 + data[8:],
    }
    file.write_bytes(broken[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read as a safetensors file"):
        SafetensorsSource(tmp_path)


def test_a_module_takes_it(sharded: Path) -> None:
    net = nn.Module()
    for name, tensor in TENSORS.items():
        net.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype))
    with SafetensorsSource(sharded) as source, torch.no_grad():
        for name, ((_, tensor),) in source.regions().items():
            net.get_buffer(name).copy_(tensor)
    assert all(bits(net.get_buffer(name)) == bits(tensor) for name, tensor in TENSORS.items())


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a FIFO would wait for whoever writes into it."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no"):
        SafetensorsSource(tmp_path)


def test_a_size_that_no_tensor_can_have_is_named_in_one_line(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"can't be read as a safetensors file: reshape.*$") as found:
        SafetensorsSource(tmp_path)
    assert "\n" not in str(found.value)
