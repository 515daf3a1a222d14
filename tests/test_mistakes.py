"""What a newcomer gets wrong, and the sentence that says what is right: one table for Python, one for the command line.

In Python each mistake is an exception of the kind that is named here, raised by our code and not out of the middle of
somebody else's; on the command line it is a status and one line, without a traceback.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weightcast
from weightcast import (
    EngineServer,
    HttpEngine,
    LocalEngine,
    MegatronSource,
    ModuleEngine,
    ModuleSource,
    Publisher,
    PublishOptions,
    Region,
    SafetensorsSource,
    StoreSource,
    TensorSource,
    TensorSpec,
    cli,
    follow,
    rollback,
)
from weightcast.cli import exits
from weightcast.engines.gate import Gate
from weightcast.engines.transformers import TextGenerator
from weightcast.errors import (
    ClosedError,
    ControlError,
    IncompatibleWeightsError,
    PeerDiedError,
    VersionNotFoundError,
    WeightcastError,
)
from weightcast.serving.follower import Follower

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SRC = Path(weightcast.__file__).parent
NOBODY = "http://127.0.0.1:9"

Mistake = Callable[[Path], object]
MISTAKES: dict[str, tuple[Mistake, type[Exception], str]] = {}


def gives(kind: type[Exception], sentence: str) -> Callable[[Mistake], Mistake]:
    """Put a mistake into the table: it must end with this kind of exception, whose text has `sentence`."""

    def add(mistake: Mistake) -> Mistake:
        assert mistake.__name__ not in MISTAKES
        MISTAKES[mistake.__name__] = (mistake, kind, sentence)
        return mistake

    return add


def linear(dtype: torch.dtype = torch.float32, size: int = 4) -> nn.Linear:
    return nn.Linear(size, size, dtype=dtype)


def publisher(**arguments: Any) -> Publisher:
    return Publisher(arguments.pop("source", None) or ModuleSource(linear()), **arguments)


def publish(source: Any, *engines: Any, version: Any = None, transport: str = "memory://", **arguments: Any) -> int:
    """Publish once; the error of an engine that did not take the version is raised by itself."""
    options = PublishOptions(on_failure="report", deadline_seconds=10.0)
    clients = [
        engine if isinstance(engine, str) else LocalEngine(engine, name=f"{n}") for n, engine in enumerate(engines)
    ]
    try:
        with Publisher(source, engines=clients, transport=transport, options=options, **arguments) as publisher:
            report = publisher.publish(version)
    finally:
        for client in clients:
            if isinstance(client, LocalEngine):
                client.close()
    for result in report.engines.values():
        if result.error is not None:
            raise weightcast.errors.from_record(result.error)
    return report.version


class Twins(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed, self.head = linear(), linear()
        if is_tied:
            self.head.weight = self.embed.weight


# --- sources ---


@gives(
    TypeError,
    "source is an OrderedDict, not a source of weights: pass ModuleSource(model), or TensorSource(state_dict)",
)
def a_state_dict_as_the_source(folder: Path) -> None:
    Publisher(linear().state_dict())  # type: ignore[arg-type]


@gives(TypeError, "source is a Linear, not a source of weights: pass ModuleSource(model)")
def a_bare_module_as_the_source(folder: Path) -> None:
    Publisher(linear())  # type: ignore[arg-type]


@gives(TypeError, "source is './checkpoint' (a str), not a source of weights: pass SafetensorsSource(directory)")
def a_string_as_the_source(folder: Path) -> None:
    Publisher("./checkpoint")  # type: ignore[arg-type]


@gives(TypeError, "source is the class ModuleSource, not a source of weights: pass an instance, ModuleSource(...)")
def a_class_as_the_source(folder: Path) -> None:
    Publisher(ModuleSource)  # type: ignore[arg-type]


@gives(TypeError, "source is 7 (an int), not a source of weights: pass an object with specs() and regions()")
def an_int_as_the_source(folder: Path) -> None:
    Publisher(7)  # type: ignore[arg-type]


@gives(TypeError, "OrderedDict is not a torch.nn.Module: pass the model itself, or TensorSource(state_dict)")
def a_state_dict_as_the_module(folder: Path) -> None:
    ModuleSource(linear().state_dict())  # type: ignore[arg-type]


@gives(TypeError, "str is not a torch.nn.Module: pass the model itself")
def a_models_name_as_the_module(folder: Path) -> None:
    ModuleSource("Qwen/Qwen3-0.6B")  # type: ignore[arg-type]


@gives(TypeError, "dtype is 'float32', which is not a torch.dtype: pass torch.float32")
def a_dtype_as_a_string(folder: Path) -> None:
    ModuleSource(linear(), dtype="float32")  # type: ignore[arg-type]


@gives(TypeError, "which is not a torch.dtype: pass torch.float16")
def a_dtype_of_numpy(folder: Path) -> None:
    SafetensorsSource(checkpoint(folder), dtype=np.float16)  # type: ignore[arg-type]


@gives(
    ValueError,
    "dtype is torch.int8; it must be torch.bfloat16, torch.float16, torch.float32, torch.float64",
)
def a_dtype_that_is_no_float(folder: Path) -> None:
    ModuleSource(linear(), dtype=torch.int8)


@gives(ValueError, "'weight' is on the meta device and has no values: materialise the module first")
def a_module_without_values(folder: Path) -> None:
    with torch.device("meta"):
        model = linear()
    publish(ModuleSource(model), ModuleEngine(linear()))


@gives(TypeError, "'a' is ndarray; each name must be a str, each value a torch.Tensor")
def an_array_among_the_tensors(folder: Path) -> None:
    TensorSource({"a": np.ones(3)})  # type: ignore[dict-item]


@gives(TypeError, "tensors is a Linear; it must be a mapping of names to tensors: pass ModuleSource(model)")
def a_module_as_tensors(folder: Path) -> None:
    TensorSource(linear())  # type: ignore[arg-type]


@gives(IncompatibleWeightsError, "call publish on every rank, with trainer_group='auto' or their group")
def a_sharded_model_published_alone(folder: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = linear()
        mesh = init_device_mesh("cpu", (2,))
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))
        publish(ModuleSource(model), ModuleEngine(linear()), trainer_group=None)
    finally:
        dist.destroy_process_group()


@gives(TypeError, "names is 'model.'; it must be a function of a name, or a mapping of names to names")
def a_prefix_as_the_names(folder: Path) -> None:
    ModuleSource(linear(), names="model.")  # type: ignore[arg-type]


@gives(TypeError, "regions() of the source must return a mapping of names to sequences of (Region, tensor)")
def a_source_of_ones_own_without_regions(folder: Path) -> None:
    class Source:
        def specs(self) -> object:
            return TensorSource(linear().state_dict()).specs()

        def regions(self) -> object:
            return linear().state_dict()

    publish(Source(), ModuleEngine(linear()))


SPEC = "one of them is TensorSpec(name='weight', "


def a_source_of(specs: Any) -> Mistake:
    class Source:
        def specs(self) -> object:
            return specs

        def regions(self) -> object:
            return {"weight": [(Region((0,), (4,)), torch.ones(4))]}

    return lambda folder: publish(Source(), ModuleEngine(linear()))


for word, specs, shown in (
    ("a_dict", {"weight": torch.ones(4)}, "it returned a dict"),
    ("nothing", None, "it returned None"),
    ("a_generator", (spec for spec in ()), "it returned a generator"),
    ("a_tuple_each", [("weight", "float32", (4,))], "one of them is a tuple"),
    ("a_dtype_of_torch", [TensorSpec("weight", torch.float32, (4,))], f"{SPEC}dtype=torch.float32,"),
    ("an_unknown_dtype", [TensorSpec("weight", "fp32", (4,))], f"{SPEC}dtype='fp32'"),
    ("a_size_as_the_shape", [TensorSpec("weight", "float32", 4)], f"{SPEC}dtype='float32', shape=4,"),
    ("a_float_in_a_shape", [TensorSpec("weight", "float32", (4.0,))], f"{SPEC}dtype='float32', shape=(4.0,)"),
):
    sentence = (
        "specs() of the source must return a sequence of TensorSpec, such as TensorSpec('weight', 'bfloat16', (8, 4"
    )
    MISTAKES[f"{word}_as_the_specs"] = (a_source_of(specs), TypeError, f"{sentence})); {shown}")


@gives(TypeError, "regions() of the source must return a mapping of names to sequences of (Region, tensor)")
def an_array_as_a_region(folder: Path) -> None:
    class Source:
        def specs(self) -> object:
            return [TensorSpec("weight", "float32", (4,))]

        def regions(self) -> object:
            return {"weight": [(Region((0,), (4,)), [1.0, 2.0, 3.0, 4.0])]}

    publish(Source(), ModuleEngine(linear()))


@gives(TypeError, "names returned None for one of ['weight']; it must return a name")
def names_that_leave_one_out(folder: Path) -> None:
    ModuleSource(linear(), names=lambda name: None)  # type: ignore[arg-type, return-value]


@gives(TypeError, "path is a Linear; it must be the path of a checkpoint's directory or file")
def a_module_as_the_checkpoint(folder: Path) -> None:
    SafetensorsSource(linear())  # type: ignore[arg-type]


@gives(
    FileNotFoundError,
    "hf_config is 'Qwen/Qwen3-0.6B', but Qwen/Qwen3-0.6B does not exist: pass a local path (nothing is downloaded)",
)
def a_models_name_as_megatrons_configuration(folder: Path) -> None:
    MegatronSource(linear(), "Qwen/Qwen3-0.6B")


# --- engines ---


@gives(TypeError, f"engines is '{NOBODY}' (a str); it must be a list of URLs or engine clients: engines=['{NOBODY}']")
def a_url_that_is_in_no_list(folder: Path) -> None:
    publisher(engines=NOBODY)


@gives(TypeError, "engines is 8000 (an int); it must be a list of URLs or engine clients")
def a_port_as_the_engines(folder: Path) -> None:
    publisher(engines=8000)


@gives(TypeError, "engines is a dict; it must be a list")
def a_dict_as_the_engines(folder: Path) -> None:
    publisher(engines={"first": NOBODY})


@gives(TypeError, "engines is a Sequential; it must be a list of URLs or engine clients")
def a_module_as_the_engines(folder: Path) -> None:
    publisher(engines=nn.Sequential(linear()))


@gives(
    TypeError,
    "8000 (an int) is not the URL or the client of an engine: pass the engine's URL, such as 'http://127.0.0.1:8000'",
)
def a_port_among_the_engines(folder: Path) -> None:
    publisher(engines=[8000])


@gives(TypeError, "a Linear is not the URL or the client of an engine: pass the URL of the server that serves it")
def a_module_among_the_engines(folder: Path) -> None:
    publisher(engines=[linear()])


@gives(TypeError, "an OrderedDict is not the URL or the client of an engine: pass its URL")
def a_state_dict_among_the_engines(folder: Path) -> None:
    publisher(engines=[linear().state_dict()])


@gives(TypeError, "a ModuleEngine is not the URL or the client of an engine: pass LocalEngine(engine)")
def an_engine_without_a_client(folder: Path) -> None:
    publisher(engines=[ModuleEngine(linear())])


@gives(
    TypeError, "an EngineServer is not the URL or the client of an engine: pass the server's URL, its `url` attribute"
)
def a_server_in_the_place_of_its_url(folder: Path) -> None:
    with EngineServer(ModuleEngine(linear())) as server:
        publisher(engines=[server])


@gives(TypeError, "such as LLMEngine(llm) of weightcast.integrations.vllm")
def an_llm_without_a_client(folder: Path) -> None:
    class Llm:
        def collective_rpc(self) -> None: ...

    publisher().add_engine(Llm())  # type: ignore[arg-type]


@gives(ValueError, "'localhost:8000' is not the URL of an engine; write one like http://127.0.0.1:8000")
def a_url_without_a_scheme(folder: Path) -> None:
    publisher(engines=["localhost:8000"])


@gives(ValueError, "'http://127.0.0.1:80000' is not the URL of an engine")
def a_port_that_is_none(folder: Path) -> None:
    publisher(engines=["http://127.0.0.1:80000"])


@gives(ValueError, "'http://' is not the URL of an engine")
def a_url_without_a_host(folder: Path) -> None:
    HttpEngine("http://")


@gives(TypeError, "8000 is not the URL of an engine; write one like http://127.0.0.1:8000")
def a_port_as_the_url(folder: Path) -> None:
    HttpEngine(8000)  # type: ignore[arg-type]


@gives(ControlError, "its URL has the path /v1: give the server's root, http://127.0.0.1:")
def a_url_with_v1(folder: Path) -> None:
    with EngineServer(ModuleEngine(linear())) as server:
        publish(ModuleSource(linear()), f"{server.url}/v1", transport="ipc://")


@gives(
    PeerDiedError,
    "can't be reached: [Errno 111] Connection refused; start the server first, or wait for it: publish(wait_ready",
)
def an_engine_that_was_not_started(folder: Path) -> None:
    publish(ModuleSource(linear()), NOBODY, transport="ipc://")


@gives(PeerDiedError, "; check the host name; start the server first, or wait for it: publish(wait_ready")
def a_host_that_has_no_address(folder: Path) -> None:
    publish(ModuleSource(linear()), "http://no-such-host.invalid:8000", transport="ipc://")


@gives(ValueError, "http://127.0.0.1:9 is in the fleet already")
def an_engine_named_twice(folder: Path) -> None:
    publisher(engines=[NOBODY, f"{NOBODY}/"])


@gives(ValueError, f"{NOBODY} is not in the fleet; it has no engines")
def an_engine_removed_that_was_never_added(folder: Path) -> None:
    publisher().remove_engine(NOBODY)


@gives(ValueError, "there is no engine to publish to, and memory:// keeps nothing for later: pass engines=[...]")
def a_publish_to_nobody(folder: Path) -> None:
    publish(ModuleSource(linear()))


@gives(ValueError, "the token must be one word of ASCII, without spaces and line ends")
def a_token_with_the_line_end_of_its_file(folder: Path) -> None:
    publisher(engines=[NOBODY], token="s3cret\n")


@gives(ValueError, "the token must be one word of ASCII")
def a_token_in_bytes(folder: Path) -> None:
    publisher(engines=[NOBODY], token=b"s3cret")


@gives(ValueError, "a token must be text, printable ASCII without spaces")
def a_servers_token_in_bytes(folder: Path) -> None:
    EngineServer(ModuleEngine(linear()), token=b"s3cret")  # type: ignore[arg-type]


@gives(WeightcastError, "pass an address of this host, and a free port or 0")
def a_server_on_another_hosts_address(folder: Path) -> None:
    EngineServer(ModuleEngine(linear()), host="192.0.2.1", token="s3cret").start()


@gives(
    OSError,
    "can't listen on 192.0.2.1:0: Cannot assign requested address; give the transport's URL an address of this host",
)
def a_store_that_is_to_be_served_at_another_hosts_address(folder: Path) -> None:
    publish(ModuleSource(linear()), transport=f"file://192.0.2.1{folder}/store")


@gives(TypeError, "Linear is not a causal language model of transformers, which generation needs")
def a_module_that_does_not_generate(folder: Path) -> None:
    TextGenerator(linear(), gate=Gate())


@gives(TypeError, "OrderedDict is not a torch.nn.Module: pass the model itself")
def a_state_dict_to_serve(folder: Path) -> None:
    ModuleEngine(linear().state_dict())  # type: ignore[arg-type]


@gives(
    TypeError,
    "Linear is not an engine: pass ModuleEngine(model), or an object with specs(), load(), commit() and discard()",
)
def a_module_to_serve(folder: Path) -> None:
    EngineServer(linear())  # type: ignore[arg-type]


@gives(ValueError, "ipc:// keeps no versions to go back to: publish into a store (file:///DIR), or publish the old")
def a_rollback_without_a_store(folder: Path) -> None:
    publisher(engines=[NOBODY]).rollback(3)


@gives(ValueError, "local is in the fleet already: name each engine once, each by its own name")
def two_engines_of_one_name(folder: Path) -> None:
    publisher(engines=[LocalEngine(ModuleEngine(linear())), LocalEngine(ModuleEngine(linear()))])


@gives(ValueError, "pause is 'freeze'; it must be one of keep, wait, abort")
def a_pause_that_is_none(folder: Path) -> None:
    LocalEngine(ModuleEngine(linear()), pause="freeze")  # type: ignore[arg-type]


@gives(ValueError, "port is 70000; it must be a number from 0 to 65535")
def a_server_on_a_port_that_is_none(folder: Path) -> None:
    EngineServer(ModuleEngine(linear()), port=70_000)


@gives(TypeError, "timeout_seconds is '10'; it must be a number of seconds, such as 60.0")
def a_timeout_as_a_string(folder: Path) -> None:
    HttpEngine(NOBODY, timeout_seconds="10")  # type: ignore[arg-type]


# --- weights that do not fit ---


@gives(
    IncompatibleWeightsError, "'weight' is float32, the engine has bfloat16; 'bias' is float32, the engine has bfloat16"
)
def a_trainer_in_fp32_and_an_engine_in_bf16(folder: Path) -> None:
    publish(ModuleSource(linear()), ModuleEngine(linear(torch.bfloat16)))


@gives(
    IncompatibleWeightsError,
    "Remedy: cast while packing: ModuleSource(model, dtype=torch.bfloat16), or `weightcast publish --dtype bfloat16`",
)
def a_trainer_in_fp32_is_told_the_remedy(folder: Path) -> None:
    publish(ModuleSource(linear()), ModuleEngine(linear(torch.bfloat16)))


@gives(
    IncompatibleWeightsError,
    "have each tensor cast to the engine's dtype: ModuleSource(model, dtype='engine'), or `--dtype engine`",
)
def an_engine_of_several_dtypes(folder: Path) -> None:
    mixed = nn.Sequential(linear(), linear(torch.bfloat16))
    publish(ModuleSource(nn.Sequential(linear(), linear())), ModuleEngine(mixed))


@gives(
    IncompatibleWeightsError,
    "1 tensor does not fit this engine: 'head.weight' and 'embed.weight' both match the engine's 'embed.weight', which "
    "ties them: tie them in the trainer too, or untie them in the engine",
)
def a_tied_engine_and_an_untied_trainer(folder: Path) -> None:
    publish(ModuleSource(Twins(is_tied=False)), ModuleEngine(Twins(is_tied=True)))


@gives(
    IncompatibleWeightsError,
    "Remedy: the trainer's names begin with '0.': publish the module that has the names without it",
)
def the_module_around_the_one_that_is_served(folder: Path) -> None:
    publish(ModuleSource(nn.Sequential(linear())), ModuleEngine(linear()))


@gives(IncompatibleWeightsError, "Remedy: the engine's names begin with '0.': publish the module around it")
def the_module_inside_the_one_that_is_served(folder: Path) -> None:
    publish(ModuleSource(linear()), ModuleEngine(nn.Sequential(linear())))


@gives(IncompatibleWeightsError, "'weight' has the shape [5, 5], the engine has [4, 4]")
def another_model(folder: Path) -> None:
    publish(ModuleSource(linear(size=5)), ModuleEngine(linear()))


@gives(IncompatibleWeightsError, "Remedy: the engine's names begin with 'model.': publish the module around it")
def the_model_without_its_head(folder: Path) -> None:
    served = nn.Module()
    served.model, served.lm_head = Twins(is_tied=False), linear()
    publish(ModuleSource(served.model), ModuleEngine(served))


# --- versions, transports, options ---


def a_version_of(value: Any) -> Mistake:
    return lambda folder: publish(ModuleSource(linear()), ModuleEngine(linear()), version=value)


for word, value, shown in (
    ("a_float", 3.0, "version is 3.0 (a float)"),
    ("a_bool", True, "version is True (a bool)"),
    ("a_string", "3", "version is '3' (a str)"),
    ("a_float_of_numpy", np.float32(3), "(a float32)"),
    ("a_bool_of_numpy", np.bool_(True), "(a bool)"),
    ("a_float_tensor", torch.tensor(3.0), "version is tensor(3.) (a Tensor)"),
    ("a_bool_tensor", torch.tensor(True), "version is tensor(True) (a Tensor)"),
    ("two_numbers", torch.tensor([3, 4]), "version is a Tensor"),
):
    MISTAKES[f"{word}_as_the_version"] = (a_version_of(value), TypeError, f"{shown}; it must be a whole number")


@gives(ValueError, "version is -1; it must be from 0 to 9223372036854775807")
def a_negative_version(folder: Path) -> None:
    a_version_of(-1)(folder)


@gives(ValueError, "version 3 is not above 3, the last one of this publisher")
def a_version_again(folder: Path) -> None:
    with Publisher(ModuleSource(linear()), transport=f"file://{folder}/store") as publisher:
        publisher.publish(3)
        publisher.publish(3)


@gives(TypeError, "None is not a transport URL; pass a str such as 'ipc://'")
def no_transport(folder: Path) -> None:
    publisher(transport=None)


@gives(TypeError, "29500 is not a transport URL; pass a str such as 'ipc://'")
def a_port_as_the_transport(folder: Path) -> None:
    publisher(transport=29500)


@gives(TypeError, "is not a transport URL; pass a str such as 'ipc://', or 'file:///DIR' for a directory")
def a_path_as_the_transport(folder: Path) -> None:
    publisher(transport=folder)


@gives(TypeError, "Linear(in_features=4, out_features=4, bias=True) is not a transport URL")
def a_module_as_the_transport(folder: Path) -> None:
    publisher(transport=linear())


@gives(ValueError, "'nccl' is not a transport URL; write one like file://, gloo://, ipc://, memory://, nccl://, s3://")
def a_transport_without_slashes(folder: Path) -> None:
    publisher(transport="nccl")


@gives(
    ValueError,
    "no transport 'http'; known here: file, gloo, ipc, memory, nccl, s3 (the URLs of engines go into engines=[...])",
)
def an_engines_url_as_the_transport(folder: Path) -> None:
    publisher(transport=NOBODY)


@gives(
    ValueError, "is only read: publish into a store of this host, file:///DIR, and copy its versions with `weightcast"
)
def a_store_of_another_host_as_the_transport(folder: Path) -> None:
    publisher(transport="store+http://127.0.0.1:8200")


@gives(TypeError, "options is a dict; it must be a PublishOptions(...) or None")
def a_dict_as_the_options(folder: Path) -> None:
    publisher(options={"undo": True})


@gives(TypeError, "undo is 'no'; it must be True or False")
def a_word_as_a_flag(folder: Path) -> None:
    PublishOptions(undo="no")  # type: ignore[arg-type]


@gives(TypeError, "bucket_size_bytes is '64MB' (a str); it must be a whole number")
def a_size_as_a_string(folder: Path) -> None:
    PublishOptions(bucket_size_bytes="64MB")  # type: ignore[arg-type]


@gives(TypeError, "bucket_size_bytes is 64000000.0 (a float); it must be a whole number")
def a_size_as_a_float(folder: Path) -> None:
    PublishOptions(bucket_size_bytes=64e6)  # type: ignore[arg-type]


@gives(TypeError, "deadline_seconds is '60'; it must be a number of seconds")
def a_deadline_as_a_string(folder: Path) -> None:
    PublishOptions(deadline_seconds="60")  # type: ignore[arg-type]


@gives(ValueError, "wait_ready_seconds is inf; it must be positive and finite")
def a_wait_without_an_end(folder: Path) -> None:
    with publisher(engines=[NOBODY]) as made:
        made.publish(wait_ready_seconds=float("inf"))


@gives(TypeError, "on_progress is True; it must be a function (done_bytes, total_bytes)")
def a_bool_as_the_progress(folder: Path) -> None:
    with publisher(engines=[NOBODY]) as made:
        made.publish(on_progress=True)  # type: ignore[arg-type]


@gives(TypeError, "trainer_group is 0 (an int); it must be 'auto', None, or a process group of torch.distributed")
def a_rank_as_the_group(folder: Path) -> None:
    publisher(trainer_group=0)


@gives(ClosedError, "this publisher was closed")
def a_publish_after_the_with_block(folder: Path) -> None:
    with publisher(engines=[NOBODY]) as made:
        pass
    made.publish()


# --- checkpoints and stores ---


def checkpoint(folder: Path) -> Path:
    save_file({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, folder / "model.safetensors")
    return folder


def store(folder: Path) -> Path:
    with Publisher(ModuleSource(linear()), transport=f"file://{folder}/store") as publisher:
        publisher.publish()
    return folder / "store"


@gives(FileNotFoundError, "no/such/directory is neither a directory nor a file")
def a_checkpoint_that_is_not_there(folder: Path) -> None:
    SafetensorsSource("no/such/directory")


@gives(FileNotFoundError, "pytorch_model.bin is a pickle, which is never read; save the model with safetensors")
def a_checkpoint_of_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    SafetensorsSource(folder)


@gives(ValueError, "store is a store of versions, not a checkpoint: use its URL, file:///")
def a_store_as_a_checkpoint(folder: Path) -> None:
    SafetensorsSource(store(folder))


@gives(ValueError, "is a store of versions, not a checkpoint: use its URL, file:///weights, with StoreSource")
def a_stores_url_as_a_checkpoint(folder: Path) -> None:
    SafetensorsSource("file:///weights")


@gives(ValueError, "'/weights' is not the URL of a store; write file:///weights")
def a_directory_as_a_stores_url(folder: Path) -> None:
    StoreSource("/weights")


@gives(TypeError, "is not the URL of a store; pass a str such as 'file:///dir'")
def a_path_as_a_stores_url(folder: Path) -> None:
    StoreSource(folder)  # type: ignore[arg-type]


@gives(VersionNotFoundError, "nowhere is not there: no such directory; check the path, or publish first")
def a_store_that_is_not_there(folder: Path) -> None:
    StoreSource(f"file://{folder}/nowhere")


@gives(VersionNotFoundError, "does not hold any version yet: publish one first")
def an_empty_store(folder: Path) -> None:
    StoreSource(f"file://{folder}")


@gives(
    VersionNotFoundError, "does not hold the version before the newest: only one was published, or it was overwritten"
)
def a_rollback_of_the_first_version(folder: Path) -> None:
    rollback(f"file://{store(folder)}")


@gives(ValueError, "ipc:// keeps no versions to follow: give the URL of a store, file:///DIR")
def following_what_is_no_store(folder: Path) -> None:
    next(follow("ipc://", ModuleEngine(linear())))


@gives(TypeError, "Linear is not an engine: pass ModuleEngine(model)")
def following_into_a_module(folder: Path) -> None:
    next(follow(f"file://{folder}", linear()))  # type: ignore[arg-type]


@gives(FileExistsError, "weights can't be made: File exists")
def a_file_as_a_store(folder: Path) -> None:
    (folder / "weights").touch()
    with Publisher(ModuleSource(linear()), transport=f"file://{folder}/weights") as publisher:
        publisher.publish()


@gives(FileNotFoundError, "the directory /proc/weights can't be made: No such file or directory")
def a_store_where_nothing_can_be_made(folder: Path) -> None:
    with Publisher(ModuleSource(linear()), transport="file:///proc/weights") as publisher:
        publisher.publish()


@gives(TypeError, "timeout_seconds is '5'; it must be a number of seconds")
def a_wait_for_a_string(folder: Path) -> None:
    with Follower(f"file://{store(folder)}", ModuleEngine(linear())) as follower:
        follower.wait("5")  # type: ignore[arg-type]


@gives(TypeError, "version is '0'; it must be a number, or a WeightVersion(run, number)")
def a_text_as_a_stores_version(folder: Path) -> None:
    StoreSource(f"file://{folder}", version="0")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_what_is_right(name: str, tmp_path: Path) -> None:
    mistake, kind, sentence = MISTAKES[name]
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    assert type(caught.value) is kind
    assert sentence in str(caught.value)
    if kind is TypeError:
        raised_in = Path(traceback.extract_tb(caught.value.__traceback__)[-1].filename)
        assert raised_in.is_relative_to(SRC), raised_in
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    "version", [7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor([7])], ids=repr
)
def test_any_whole_number_is_a_version(version: Any) -> None:
    assert publish(ModuleSource(linear()), ModuleEngine(linear()), version=version) == 7


def test_one_engine_is_not_many() -> None:
    with Publisher(ModuleSource(linear(size=5)), engines=[LocalEngine(ModuleEngine(linear()))]) as made:
        with pytest.raises(weightcast.PublishError, match=r"^1 of 1 engine did not take version 0: local: "):
            made.publish()
        made.remove_engine("local")


def test_a_bucket_size_may_be_one_of_numpys_numbers() -> None:
    assert type(PublishOptions(bucket_size_bytes=np.int64(4096)).bucket_size_bytes) is int  # type: ignore[arg-type]


# --- the command line ---

COMMANDS: tuple[tuple[str, int, str], ...] = (
    ("publsh", exits.USAGE, "invalid choice: 'publsh' (choose from"),
    ("inspect {store}", exits.USAGE, "store is a store of versions, not a checkpoint: use its URL, file://{store}"),
    *(
        (command, exits.NEGATIVE, "nowhere is not there: no such directory; check the path, or publish first")
        for command in (
            "inspect file://{folder}/nowhere",
            "verify file://{folder}/nowhere",
            "rollback file://{folder}/nowhere",
            "export file://{folder}/nowhere out",
            "pull file://{folder}/nowhere file://{folder}/near",
            "push file://{folder}/nowhere file://{folder}/near",
        )
    ),
    ("inspect file://{folder}", exits.NEGATIVE, "{folder} does not hold any version yet: publish one first"),
    ("inspect Qwen/Qwen3-0.6B", exits.USAGE, "Qwen/Qwen3-0.6B is neither a directory nor a file"),
    ("inspect 127.0.0.1:8000", exits.USAGE, "if it is an engine, write http://127.0.0.1:8000"),
    ("inspect http://127.0.0.1:80000", exits.USAGE, "is not the URL of an engine; write one like"),
    ("inspect {url}/v1", exits.NEGATIVE, "its URL has the path /v1: give the server's root, {url}"),
    ("publish {checkpoint}", exits.USAGE, "at least one --engine, or --transport file:///dir for a store, is required"),
    ("publish {checkpoint} --engine 127.0.0.1:8000", exits.USAGE, "is not the URL of an engine; write one like"),
    ("publish {checkpoint} --engine {url} --engine {url}", exits.USAGE, "{url} is in the fleet already"),
    ("publish {checkpoint} --engine {url} --transport nccl", exits.USAGE, "'nccl' is not a transport URL; write one"),
    ("publish {checkpoint} --engine {url} --version 1.5", exits.USAGE, "'1.5' is not a whole number from 0 to"),
    ("publish --wait {checkpoint} --engine {url}", exits.USAGE, "is not a finite number of seconds above 0"),
    ("publish {store} --engine {url}", exits.USAGE, "`weightcast follow` to install its versions in engines"),
    ("publish file://{store} --engine {url}", exits.USAGE, "`weightcast follow` to install its versions in engines"),
    ("follow {store} --engine {url}", exits.USAGE, "is not the URL of a store; write file://{store}"),
    (
        "follow file://{folder}/nowhere --engine {url} --once --deadline 0.1",
        exits.NEGATIVE,
        "no complete version came into file://{folder}/nowhere within 0.1 s: check that it is the right one",
    ),
    (
        "follow {folder} --marker STABLE --engine {url} --once --deadline 0.1",
        exits.NEGATIVE,
        "no complete version (a directory with the file STABLE) came into {folder} within 0.1 s: check that it is",
    ),
    ("follow file://{store} --engine nonsense", exits.USAGE, "'nonsense' is not the URL of an engine; write one like"),
    ("export {store} out", exits.USAGE, "is not the URL of a store; write file://{store}"),
    (
        "export file://{store} {folder}",
        exits.NEGATIVE,
        "exists already: name another directory, or remove this one first",
    ),
    ("verify {store} --engine {url}", exits.USAGE, "store is a store of versions, not a checkpoint"),
    (
        "serve Qwen/Qwen3-0.6B",
        exits.USAGE,
        "is not a directory: download the model first (this command downloads nothing)",
    ),
    ("serve {checkpoint}", exits.USAGE, "has no config.json: pass the directory that save_pretrained wrote"),
    (
        "publish {checkpoint} --transport file:///proc/x",
        exits.USAGE,
        "the directory /proc/x can't be made: No such file",
    ),
    ("export file://{store} /proc/x", exits.USAGE, "the directory /proc/x can't be made: No such file"),
    ("bench --total-mib 99999999", exits.NEGATIVE, "left: use a smaller --total-mib"),
    ("bench nccl://", exits.USAGE, "nccl sends GPU memory, but this command measures host memory: use ipc"),
)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the commands are about: a folder, a checkpoint and a store in it, and the URL of an engine."""
    folder = tmp_path_factory.mktemp("mistakes")
    with EngineServer(ModuleEngine(linear())) as server:
        (folder / "checkpoint").mkdir()
        made = checkpoint(folder / "checkpoint"), store(folder)
        yield {"folder": str(folder), "checkpoint": str(made[0]), "store": str(made[1]), "url": server.url}


@pytest.mark.parametrize(("command", "status", "sentence"), COMMANDS, ids=[command for command, _, _ in COMMANDS])
def test_a_wrong_command_is_one_line(
    command: str, status: int, sentence: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = cli.main(command.format(**names).split())
    except SystemExit as exc:
        ended = exc.code
    captured = capsys.readouterr()
    assert ended == status, captured
    *usage, line = captured.err.splitlines()
    assert sentence.format(**names) in line
    assert not usage or usage[0].startswith("usage: weightcast ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_fp32_on_the_command_line_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EngineServer(ModuleEngine(linear(torch.bfloat16))) as server:
        assert cli.main(["publish", str(checkpoint(tmp_path)), "--engine", server.url]) == exits.NEGATIVE
    captured = capsys.readouterr()
    assert "`weightcast publish --dtype " in captured.out
    assert "Traceback" not in captured.out + captured.err
