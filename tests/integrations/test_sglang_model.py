"""SGLang's sessions around installs, of a model and an updater of weights in SGLang's form; without SGLang."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from core.direct import fleet
from safetensors.torch import save_file
from torch import nn

from weightcast import TensorSource
from weightcast.errors import PublishError, UnsupportedError
from weightcast.integrations.sglang.model import SglangModel

pytestmark = pytest.mark.usefixtures("leaves_nothing")
NUM_VERSIONS = 4
NAMES = ("first.weight", "second.weight")


class Model(nn.Module):
    """`scaled`: whether its loader computes one of its two weights."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.requires_grad_(False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor * 2 if self.scaled and name == "second.weight" else tensor)


class Updater:
    """Counts the sessions; `end` is what the end of one does to the model."""

    def __init__(self, model: Model, end: Callable[[Model], object]) -> None:
        self.model, self.end = model, end
        self.num_begun = self.num_ended = 0

    def begin_weight_update(self) -> None:
        self.num_begun += 1

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self.num_ended += 1
        self.end(self.model)


def runner_of(folder: Path, model: Model, updater: Updater) -> SimpleNamespace:
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(model_path=str(folder), revision=None),
        weight_updater=updater,
        server_args=SimpleNamespace(download_dir=None),
        lora_manager=None,
        spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
    )


def engine_of(folder: Path, model: Model, updater: Updater) -> SglangModel:
    return SglangModel(runner_of(folder, model, updater), unsupported=(), flush=lambda: True)


def sessions_of(folder: Path, model: Model, end: Callable[[Model], object]) -> int:
    """How many sessions some publishes take, the first of which proves what can be copied."""
    updater = Updater(model, end)
    tensors = {name: torch.zeros(4, 4) for name in NAMES}
    with fleet(TensorSource(tensors), engine_of(folder, model, updater)) as (publisher, _):
        for number in range(1, NUM_VERSIONS + 1):
            for tensor in tensors.values():
                tensor.fill_(number)
            publisher.publish(number)
            assert model.first.weight.eq(number).all()
            assert model.second.weight.eq(2 * number if model.scaled else number).all()
    assert updater.num_begun == updater.num_ended
    return updater.num_begun


@pytest.mark.parametrize("scaled", [False, True], ids=["copies", "loader"])
def test_every_install_is_in_a_session(tmp_path: Path, scaled: bool) -> None:
    assert sessions_of(tmp_path, Model(scaled=scaled), lambda model: None) == NUM_VERSIONS


def test_a_session_that_does_something_later_on_is_not_left_out(tmp_path: Path) -> None:
    """Its end has nothing to do in the first installs, as after a change of the engine's settings."""
    ends: list[int] = []

    def end(model: Model) -> None:
        ends.append(len(ends))
        if len(ends) == NUM_VERSIONS:
            model.made = object()

    model = Model(scaled=False)
    assert sessions_of(tmp_path, model, end) == NUM_VERSIONS
    assert hasattr(model, "made")


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "moved"])
def test_a_layer_in_anothers_place_is_refused(tmp_path: Path, is_new: bool) -> None:
    """SGLang may go on with the former one, which it refers to from elsewhere too."""
    model = Model(scaled=False)
    first, second = model.first, model.second
    tensors = {name: torch.ones(4, 4) for name in NAMES}
    engine = engine_of(tmp_path, model, Updater(model, lambda model: None))
    with fleet(TensorSource(tensors), engine) as (publisher, _):
        publisher.publish(1)
        model.first, model.second = (copy.deepcopy(first), second) if is_new else (second, first)
        for number in (2, 3):
            with pytest.raises(PublishError, match=r"first.* took another layer's place since SGLang has loaded"):
                publisher.publish(number)
        model.first, model.second = first, second
        for tensor in tensors.values():
            tensor.fill_(4)
        publisher.publish(4)
        assert model.first.weight.eq(4).all()
        assert model.second.weight.eq(4).all()


def test_a_draft_model_whose_names_can_not_be_known_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Without a header to read, and with layers that both models would load."""
    runners = [
        runner_of(tmp_path, model, Updater(model, lambda _: None))
        for model in (Model(scaled=False), Model(scaled=False))
    ]
    remedy = "start SGLang with WEIGHTCAST_DRAFT=keep in its environment"
    with pytest.raises(UnsupportedError, match=f"can be read: save both as safetensors, or {remedy}"):
        SglangModel(runners[0], draft=runners[1], unsupported=(), flush=lambda: True)
    save_file({name: torch.zeros(4, 4) for name in NAMES}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=f"both the main model and its MTP layers load first.weight.*{remedy}"):
        SglangModel(runners[0], draft=runners[1], unsupported=(), flush=lambda: True)
