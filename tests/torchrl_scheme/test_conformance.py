"""What TorchRL's class of this name can be held against, in the eight groups of its reference page."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torchrl
import torchrl.weight_update.llm as stock
import tqdm
from tensordict import TensorDict
from torchrl.weight_update.weight_sync_schemes import WeightStrategy, WeightSyncScheme
from torchrl_scheme.scheme_kit import TENSORS, Copies, sender_of, version_in, vllm_shape, weights

from weightcast import registry
from weightcast.integrations import torchrl as ours
from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme as Scheme
from weightcast.testing.transport_kit import PATIENCE_SECONDS, SHORT_SECONDS, Background
from weightcast.trainer.publisher import Publisher

tqdm.tqdm.monitor_interval = 0  # peft's bars start no thread
tqdm.tqdm.get_lock()  # and no process in the middle of a test

STRATEGIES = ["tensordict", "state_dict"]
pytestmark = pytest.mark.filterwarnings("ignore:state_dict strategy:UserWarning")


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    )


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


# --- 1: the scheme ---


@pytest.mark.parametrize("name", ours.__all__)
def test_signatures_are_those_of_torchrl(name: str) -> None:
    """What takes TorchRL's arguments takes them here; more may be taken."""
    for method, function in vars(getattr(stock, name)).items():
        if (method.startswith("_") and method != "__init__") or not inspect.isfunction(function):
            continue
        expected = inspect.signature(function).parameters.values()
        found = inspect.signature(getattr(getattr(ours, name), method)).parameters
        for parameter in expected:
            assert parameter.name in found, (method, parameter)
            assert found[parameter.name].kind == parameter.kind, (method, parameter)
            assert found[parameter.name].default == parameter.default, (method, parameter)


def test_attributes_and_defaults() -> None:
    scheme = Scheme("/somewhere")
    assert isinstance(scheme, WeightSyncScheme)
    assert (scheme.remote_addr, scheme.local_addr, scheme.num_threads) == ("/somewhere", "/somewhere", 1)
    assert scheme.strategy_name == "tensordict"
    scheme = Scheme("/there", "/here", 4, "state_dict")
    assert (scheme.remote_addr, scheme.local_addr, scheme.num_threads) == ("/there", "/here", 4)
    assert isinstance(scheme.strategy, WeightStrategy)
    assert scheme.strategy.extract_as == "state_dict"


def test_an_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match="extract_as"):
        Scheme("/somewhere", strategy="neither").create_sender()  # type: ignore[arg-type]


def test_pickling_keeps_what_it_was_made_of(tmp_path: Path) -> None:
    scheme = Scheme(str(tmp_path), None, 2, "state_dict")
    scheme.init_on_sender(model_id="policy")
    scheme.get_sender().update_weights({"a": torch.ones(1)})
    for other in (pickle.loads(pickle.dumps(scheme)), pickle.loads(pickle.dumps(scheme.create_transport()))):
        assert (other.remote_addr, other.local_addr, other.num_threads) == (str(tmp_path), str(tmp_path), 2)
    with pytest.raises(RuntimeError):
        pickle.loads(pickle.dumps(scheme)).get_sender()
    scheme.shutdown()


def test_transports(tmp_path: Path) -> None:
    scheme = Scheme(str(tmp_path / "w"))
    transport = scheme.create_transport(None, worker_idx=3, anything=object())
    assert transport.check_connection() is True
    assert transport.receive_weights(timeout=0.01) is None
    transport.send_weights("model", TensorDict({"a": {"b": torch.ones(3)}}, batch_size=[]))
    found = transport.receive_weights(timeout=1, weights=None, model=None, strategy=None)
    assert isinstance(found, TensorDict)
    assert set(found.keys()) == {"a.b"}
    transport.send_weights("model", {"a": torch.zeros(3)})
    assert torch.equal(found["a.b"], torch.ones(3))
    assert transport.receive_weights() is not None
    assert transport.receive_weights() is None


def test_closing_a_transport_waits_for_a_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, publish = Scheme(str(tmp_path / "w")).create_transport(), Publisher.publish
    has_begun, may_go_on = threading.Event(), threading.Event()

    def publish_later(publisher: Publisher, *args: Any, **options: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_SECONDS)
        return publish(publisher, *args, **options)

    monkeypatch.setattr(Publisher, "publish", publish_later)
    sends = Background(transport.send_weights, "model", {"a": torch.zeros(3)})
    assert has_begun.wait(PATIENCE_SECONDS)
    closes = Background(transport.close)
    assert not closes.is_done_within(SHORT_SECONDS)
    may_go_on.set()
    sends.result()
    closes.result()
    assert transport.receive_weights() is not None
    transport.close()


def test_remote_and_local_are_two_sights_of_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").symlink_to(tmp_path / "remote")
    monkeypatch.chdir(tmp_path)
    scheme, taken = Scheme("remote", "local"), Copies()
    sender_of(scheme).update_weights({"a": torch.ones(1)})
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)


# --- 2: what is sent ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("given", ["model", "module", "dict", "td", "nested td", "nested dict"])
def test_sources_of_weights(tmp_path: Path, strategy: Any, given: str) -> None:
    module, taken = model(), Copies()
    state = dict(module.state_dict())
    flat = TensorDict(state, batch_size=[])
    sources: dict[str, Any] = {
        "model": None,
        "module": module,
        "dict": state,
        "td": flat,
        "nested td": flat.unflatten_keys("."),
        "nested dict": flat.unflatten_keys(".").to_dict(),
    }
    scheme = Scheme(str(tmp_path), strategy=strategy)
    sender = sender_of(scheme, module)
    sender.update_weights(sources[given])
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert same(taken.held, state)


def test_a_sender_without_a_model(tmp_path: Path) -> None:
    sender = Scheme(str(tmp_path)).create_sender()
    for given in (None, {"a": torch.ones(1)}):
        with pytest.raises(RuntimeError, match="register_model"):
            sender.update_weights(given)
    module = model()
    sender.register_model(module)
    del module
    with pytest.raises(RuntimeError, match="Model reference is dead"):
        sender.update_weights()
    sender.update_weights({"a": torch.ones(1)})


def test_what_is_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    sender = sender_of(Scheme(str(tmp_path)))
    for given, kind, message in (
        (3, TypeError, "int"),
        ({"a": torch.ones(2, device="meta")}, ValueError, "'a' is .* on meta"),
        ({"a": torch.ones(2, 2).to_sparse()}, ValueError, "sparse"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ValueError, "two tensors have the name 'a.b'"),
    ):
        with pytest.raises(kind, match=message):
            sender.update_weights(given)


def test_parameters_that_are_not_there_are_refused_by_name(tmp_path: Path) -> None:
    """As DeepSpeed ZeRO-3 and FSDP1 leave them: a part of each, or nothing, in place of the whole."""
    sender = sender_of(Scheme(str(tmp_path)))
    for marks, message in (
        ({"ds_shape": torch.Size([4, 4])}, "'0?.?weight' is partitioned by DeepSpeed ZeRO-3"),
        ({"_fsdp_flattened": True}, "'0?.?weight' is flattened by an FSDP1 wrapper"),
    ):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4))
        module[0].weight.data = torch.empty(0)
        for name, value in marks.items():
            setattr(module[0].weight, name, value)
        for given in (module, {"weight": module[0].weight}):
            with pytest.raises(ValueError, match=message):
                sender.update_weights(given)


def test_changed_replaced_and_new_tensors_are_all_noticed(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    held = {"a": torch.zeros(4, 4), "b": torch.zeros(3)}
    changes = (
        lambda: held["a"].fill_(1),
        lambda: held.update(a=torch.full((4, 4), 2.0)),
        lambda: held["a"].set_(torch.full((4, 4), 3.0)),
        lambda: held.update(a=torch.arange(16.0).view(4, 4).t()),
        lambda: held.update(a=held["a"].t()),
        lambda: held.update(c=torch.ones(2)),
        lambda: held.update(b=held["b"].to(torch.bfloat16)),
        lambda: held.pop("c"),
        lambda: held.update(b=held["a"]),
    )
    for change in changes:
        change()
        sender.update_weights(held)
        assert receiver.poll_and_apply(timeout=0)
        assert same(taken.held, held)


# --- 3: strategies ---


class Adapted(torch.nn.Module):
    """As a PEFT model: what an engine can load comes out of `merge_and_unload`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(3, 3, bias=False)
        self.delta = torch.nn.Parameter(torch.ones(3, 3))

    def merge_and_unload(self) -> torch.nn.Module:
        with torch.no_grad():
            self.base.weight += self.delta
        return torch.nn.Sequential(self.base)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_are_merged_into_what_is_sent(tmp_path: Path, strategy: Any) -> None:
    module, taken = Adapted(), Copies()
    scheme = Scheme(str(tmp_path), strategy=strategy)
    before = module.base.weight.detach().clone()
    sender_of(scheme, module).update_weights()
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert same(taken.held, {"0.weight": before + 1})
    assert torch.equal(module.base.weight, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peft_models_are_merged_and_their_parts_refused(tmp_path: Path, strategy: Any) -> None:
    base = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    module: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"]))
    scheme, taken = Scheme(str(tmp_path), strategy=strategy), Copies()
    sender, receiver = sender_of(scheme, module), scheme.create_receiver(taken.engine)
    for seed in range(2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        expected = copy.deepcopy(module).merge_and_unload().state_dict()
        before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in module.named_parameters()}
        sender.update_weights()
        assert receiver.poll_and_apply(timeout=0)
        assert same(taken.held, expected)
        for name, tensor in module.named_parameters():
            assert tensor.data_ptr() == before[name][0]
            assert torch.equal(tensor, before[name][1])
    for given in (module.state_dict(), scheme.strategy.extract_weights(torch.nn.ModuleDict({"m": module}))):
        with pytest.raises(ValueError, match=r"'.*' is a part of a layer with a PEFT adapter"):
            sender.update_weights(given)


# --- 4 and 5: engines and their prefix caches ---


@pytest.mark.parametrize("inner", [True, False])
def test_direct_engines_get_a_list_of_pairs(tmp_path: Path, inner: bool) -> None:
    scheme, calls = Scheme(str(tmp_path)), []
    sender_of(scheme).update_weights({"a": {"b": torch.ones(2)}, "c": torch.tensor(3.0)})
    assert scheme.create_receiver(vllm_shape(calls.append, inner=inner)).poll_and_apply(timeout=0)
    ((pairs,),) = (calls,)
    assert [(name, tensor.tolist(), tensor.device.type) for name, tensor in pairs] == [
        ("a.b", [1, 1], "cpu"),
        ("c", 3.0, "cpu"),
    ]


def test_torchrls_local_wrapper_is_looked_through(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender_of(scheme).update_weights(weights(1))
    assert scheme.create_receiver(SimpleNamespace(llm_instance=taken.engine)).poll_and_apply(timeout=0)
    assert version_in(taken.held) == 1


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is not a vLLM engine: it has neither collective_rpc nor"):
        Scheme(str(tmp_path)).create_receiver(object())
    with pytest.raises(TypeError, match="not an engine of a known kind"):
        registry.engine_clients(object())


@pytest.mark.parametrize(
    ("answers", "num_calls", "warns"),
    [([None], 1, False), ([True], 1, False), ([False, True], 2, False), ([False, False], 2, True)],
)
def test_the_prefix_cache_is_reset_with_one_retry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answers: list[Any], num_calls: int, warns: bool
) -> None:
    scheme, taken, order = Scheme(str(tmp_path)), Copies(), []
    taken.engine.reset_prefix_cache = lambda: order.append(len(taken.calls)) or answers[len(order) - 1]
    sender_of(scheme).update_weights(weights(1))
    with caplog.at_level(logging.WARNING):
        assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    assert order == [1] * num_calls, "after the load"
    assert bool(caplog.records) is warns


def test_a_torchrl_that_was_not_tested_is_named_with_the_one_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Scheme(str(tmp_path))
    assert not caplog.records
    monkeypatch.setattr(torchrl, "__version__", "0.15.0")
    Scheme(str(tmp_path))
    assert "tested with TorchRL 0.14, found TorchRL 0.15.0" in caplog.text
    assert "pip install 'torchrl==0.14.*'" in caplog.text


def test_a_prefix_cache_that_is_not_reset_is_reset_once_more(tmp_path: Path) -> None:
    loads, resets = [], []
    engine = vllm_shape(lambda pairs: loads.append(list(pairs)))
    engine.reset_prefix_cache = lambda: resets.append(1) or len(resets) > 1
    receiver = Scheme(str(tmp_path)).create_receiver(engine)
    receiver.apply_weights(TensorDict(w=torch.zeros(2)))
    ((pair,),) = loads
    assert (pair[0], pair[1].tolist(), len(resets)) == ("w", [0, 0], 2)


# --- 6: calls ---


def test_out_of_place_is_refused(tmp_path: Path) -> None:
    receiver = Scheme(str(tmp_path)).create_receiver(vllm_shape(print))
    with pytest.raises(ValueError, match="out of place"):
        receiver.apply_weights(TensorDict(w=torch.zeros(2)), inplace=False)


def test_a_poll_that_waits_takes_what_comes(tmp_path: Path) -> None:
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender, receiver = sender_of(scheme), scheme.create_receiver(taken.engine)
    timer = threading.Timer(0.1, lambda: sender.update_weights(weights(1)))
    timer.start()
    assert receiver.poll_and_apply() is True
    timer.join()
    assert version_in(taken.held) == 1


@pytest.mark.parametrize("newer", [True, False])
def test_the_lifecycle_works(tmp_path: Path, newer: bool) -> None:
    scheme, module, taken = Scheme(str(tmp_path)), model(), Copies()
    with pytest.raises(RuntimeError, match=r"init_on_sender\(\)"):
        scheme.get_sender()
    with pytest.raises(RuntimeError, match=r"init_on_worker\(\)"):
        scheme.get_receiver()
    context = SimpleNamespace(policy=module, engine=taken.engine)
    context = type("Context", (), vars(context))()  # TorchRL holds it weakly
    scheme.init_on_sender("policy", context)
    if newer:
        scheme.init_on_receiver(model_id="engine", context=context)
    else:
        scheme.init_on_worker("engine", context)
    assert scheme.get_sender() is scheme.get_sender()
    scheme.get_sender().update_weights()
    assert scheme.get_receiver().poll_and_apply(timeout=0)
    assert same(taken.held, module.state_dict())
    scheme.send({"a": torch.ones(2)})
    assert scheme.receive() is True
    assert scheme.receive(timeout=0.01) is False
    assert set(taken.held) == {"a"}
    scheme.shutdown()
    scheme.shutdown()


def test_init_on_a_worker_without_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no engine to update"):
        Scheme(str(tmp_path)).init_on_worker("policy")


def test_connect_sends_and_takes_the_first_version(tmp_path: Path) -> None:
    trainer, worker, module, taken = Scheme(str(tmp_path)), Scheme(str(tmp_path)), model(), Copies()
    trainer.init_on_sender("policy", model=module)
    trainer.connect()
    worker.init_on_receiver("policy", engine=taken.engine)
    worker.connect(worker_idx=0)
    assert same(taken.held, module.state_dict())
    trainer.shutdown()
    worker.shutdown()


# --- 7: dtypes and layouts; names are W17's ---


def test_layouts_round_trip(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    given = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(5),
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "complex": torch.ones(3, dtype=torch.complex64),
        "int8": torch.arange(7, dtype=torch.int8),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nan": torch.tensor([float("nan"), -0.0]),
        "odd bytes": torch.ones(3, dtype=torch.bool),
        "larger than a bucket": torch.arange(17 << 20, dtype=torch.int32),
    }
    scheme, taken = Scheme(str(tmp_path)), Copies()
    sender_of(scheme).update_weights(given)
    assert scheme.create_receiver(taken.engine).poll_and_apply(timeout=0)
    for name, tensor in given.items():
        found = taken.held[name]
        assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, False), name
        assert torch.equal(found, tensor.detach()) or name == "nan"
    assert taken.held["nan"].view(torch.int32).tolist() == given["nan"].view(torch.int32).tolist()


# --- 8: what stays TorchRL's ---


def test_torchrls_registry_is_left_alone() -> None:
    with pytest.raises(ValueError, match="Unsupported weight-sync backend"):
        Scheme.from_backend("weightcast")  # type: ignore[arg-type]
    scheme = WeightSyncScheme.from_backend("direct")
    assert type(scheme).__name__ == "NoWeightSyncScheme"


def test_no_warning_that_torchrl_would_not_give() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scheme("/somewhere", strategy="state_dict")
        Scheme("/somewhere").create_sender()
    assert TENSORS
