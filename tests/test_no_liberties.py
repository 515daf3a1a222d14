"""Nothing of weightcast changes torch, another library or the process it runs in: read from the source, every place.

DESIGN promise 8. A place that has to is in `PERMITTED`, with its reason; the table and the source must agree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from test_layers import MODULES

NAMES = (
    *(
        "gc.disable",
        "gc.enable",
        "gc.freeze",
        "gc.unfreeze",
        "gc.collect",
        "gc.set_*",
        "gc.callbacks",
        "gc.get_objects",
    ),
    *(
        "os.putenv",
        "os.unsetenv",
        "os.chdir",
        "os.fchdir",
        "os.umask",
        "os.nice",
        "os.set*",
        "os.sched_set*",
        "os.dup2",
    ),
    *("os.register_at_fork", "atexit.*", "signal.signal", "signal.set*", "signal.alarm", "signal.pthread_sigmask"),
    *("sys.set*", "sys.addaudithook", "sys._*", "threading.settrace*", "threading.setprofile*", "threading.stack_size"),
    *("warnings.simplefilter", "warnings.filterwarnings", "warnings.resetwarnings", "warnings.catch_warnings"),
    *("logging.basicConfig", "logging.disable", "logging.captureWarnings", "logging.set*", "logging.addLevelName"),
    *("multiprocessing.*", "torch.multiprocessing.*", "faulthandler.*", "resource.set*", "locale.setlocale"),
    *(
        "socket.setdefaulttimeout",
        "asyncio.set_*",
        "builtins.*",
        "tracemalloc.*",
        "ctypes.pythonapi.*",
        "inspect.stack",
    ),
    *("torch.library.*", "torch._C.*", "torch.set_*", "torch.use_deterministic*", "torch.manual_seed", "torch.seed"),
    *("torch.compiler.*", "torch._dynamo.*", "torch.overrides.*", "torch.utils._python_dispatch.*"),
    *("torch.random.*", "torch.serialization.*", "torch.cuda.set_*", "torch.cuda.memory.*", "torch.backends.*"),
    *(
        "torch.autograd.set_*",
        "torch.autograd.graph.*",
        "torch.nn.modules.module.register_*",
        "weakref.finalize.atexit",
    ),
    *("torch._subclasses.*", "torch.fx.*", "torch.distributed.init_process_group"),
)
"""What changes the process, torch, or what others see of them; also what only looks inside."""

CHANGING = {"update", "setdefault", "pop", "popitem", "clear", "append", "insert", "extend", "remove", "sort"}
"""Methods that change a container."""

PROGRAM = "a program of weightcast's own, which is the whole process"
TESTS = "for tests, and undone when its `with` ends"
KEY = "tells storages without memory apart; nothing is read there"
PERMITTED: dict[tuple[str, str], str] = {
    ("__init__", "sets an item of a namespace"): "its own exports, imported when they are asked for",
    ("checkpoint.conversion", "torch.utils._python_dispatch.TorchDispatchMode"): (
        "for a `with` around transformers' own conversion; torch compiles nothing in the process meanwhile"
    ),
    ("cli", "os.dup2"): PROGRAM,
    ("cli.serve", "logging.basicConfig"): PROGRAM,
    ("cli.output", "signal.signal"): PROGRAM,
    ("cli.serve_store", "logging.basicConfig"): PROGRAM,
    ("cli.serve", "torch.set_num_threads"): PROGRAM,
    ("cli.serve", "torch.manual_seed"): PROGRAM,
    ("control.server.app", "signal.signal"): "EngineServer.run serves until a signal; put back in a finally",
    ("checkpoint.conversion", "uses ._cdata"): KEY,
    ("checkpoint.live", "uses ._cdata"): KEY,
    ("checkpoint.sharding", "uses ._cdata"): KEY,
    ("engines.module", "torch.autograd.graph.increment_version"): "torch's own way to say that tensors were written to",
    ("format.bucket", "sets an item of a namespace"): "a dictionary of its own, of that name",
    ("host.closing", "atexit.register"): "closes what is open before threads end in torch; changes nothing else",
    ("host.closing", "os.register_at_fork"): "closes weightcast's own sockets in a child; changes nothing else",
    ("host.device_memory", "os.set_inheritable"): "of a descriptor of its own, which started programs must not have",
    (
        "integrations.plugin.dry_run",
        "changes a namespace",
    ): "modules get other tensors for a `with`; put back in a finally",
    (
        "integrations.plugin.dry_run",
        "torch._C._disabled_torch_function_impl",
    ): "how torch's own Parameter takes no functions",
    ("integrations.plugin.model", "changes a namespace"): "an undo gives modules the attributes that they had",
    ("integrations.plugin.model", "sets .data of tensor"): "an undo gives parameters the memory that they had",
    ("integrations.sglang.engine", "sets .continue_generation of manager"): (
        "a server that somebody asks to go on stays paused while it is torn; its name is in `internals`"
    ),
    (
        "integrations.sglang.engine",
        "sets .is_pause of self._manager",
    ): "the pause of an install, which SGLang can't be asked for",
    (
        "integrations.sglang.plugin",
        "sets .weight_version of request",
    ): "a load without a label would have that of the version before it",
    ("integrations.plugin.refusal", "setattr(owner)"): (
        "an engine object of this process refuses requests while it is torn; put back once it is whole"
    ),
    ("integrations.plugin.refusal", "delattr(owner)"): "puts back what setattr has replaced",
    (
        "integrations.sglang.registered_adapters",
        "sets ._validate_and_resolve_lora of manager",
    ): "an adapter's name stands for its newest version; its own name is looked up at start",
    ("integrations.sglang.registered_adapters", "sets .lora_path of request"): "the version that the name stands for",
    ("integrations.sglang.scheduler", "setattr(scheduler)"): "an attribute of its own name",
    ("integrations.sglang.scheduler", "sets .message of reply"): "a reply that weightcast answers with",
    **{
        ("integrations.sglang.stock.route_tensor", f"torch.multiprocessing.reductions.{name}"): (
            "named in a handle, for SGLang's reader to call; never called here"
        )
        for name in ("rebuild_cuda_tensor", "rebuild_storage_filename", "rebuild_tensor", "rebuild_typed_storage")
    },
    (
        "integrations.trl.transfer",
        "sets .should_log of control",
    ): "a callback's way to ask for a log; put back as it was",
    ("integrations.vllm.layerwise_load", "setattr(self._layer)"): "fills a layer's parameter, as vLLM's reload does",
    (
        "integrations.vllm.layerwise_load",
        "sets .kernel_tensors of self._info",
    ): "vLLM's record of a reload that is under way",
    (
        "integrations.vllm.layerwise_load",
        "sets .kernel_non_persistent_buffers of self._info",
    ): "vLLM's record of a reload",
    ("integrations.vllm.model", "sets ._do_torchao_reload of model"): "gives back what a reload has changed",
    (
        "integrations.vllm.layerwise_load",
        "sets .moe_kernel of method",
    ): "vLLM packs experts on a CPU only without; made again by it",
    ("integrations.vllm.layerwise_load", "sets .weight_loader of tensor"): "of a tensor that is made for one load",
    ("integrations.vllm.layerwise_load", "sets .weight_loader of made"): "of a tensor that is made for one load",
    ("integrations.vllm.model", "sets .weight_loader of tensor"): "of a tensor that is made for one dry run",
    ("integrations.vllm.plugin", "setattr(WorkerBase)"): "one method of its own name, which vLLM calls by that name",
    ("integrations.vllm.transfer_engine", "setattr(each)"): "sleep and reload say that they change weights, then run",
    ("native.tables", "torch._C.DisableTorchFunctionSubclass"): "for a `with`, this thread's; torch documents it",
    ("process_group", "changes os.environ"): "torch reads some settings from there alone; put back in a finally",
    ("process_group", "sets os.environ"): "the same settings",
    ("testing.faults", "sets an item of a namespace"): TESTS,
    ("testing.faults", "changes a namespace"): TESTS,
    ("testing.leftovers", "gc.collect"): "in tests alone: an error that a test caught is in a circle with its frame",
    ("trainer.options", "object.__setattr__"): "a frozen record of its own, while it is made",
    ("trainer.publish_run", "setattr(self._seconds)"): "a record of its own",
}


def parts_of(node: ast.expr) -> str:
    """The dotted name of an expression, "" where it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = parts_of(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def imported(tree: ast.Module) -> dict[str, str]:
    """Each name that an import binds, and the dotted name that it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def targets_of(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes, those in tuples among them."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            found = list(targets)
        case ast.AugAssign(target=target):
            found = [target]
        case ast.AnnAssign(target=target, value=ast.expr()):
            found = [target]
        case ast.For(target=target) | ast.comprehension(target=target):
            found = [target]
        case ast.withitem(optional_vars=ast.expr() as target):
            found = [target]
        case _:
            return []
    return [leaf for target in found for leaf in (target.elts if isinstance(target, ast.Tuple) else [target])]


NEAR_OTHERS = ("integrations.", "checkpoint.", "sources.")
"""Here objects of other libraries go by names of any kind: each attribute that is set on one is a place."""
BY_ADDRESS = ("from_address", "string_at", "memmove", "_cdata", "__array_interface__")
"""Memory of any object, or an object of torch's, by its address."""
OWN_OBJECTS = {
    *("self._mutex", "self._engine.worker", "self._workers", "self._sockets", "self._sink", "server", "load"),
    *("made.probe", "exc.torn"),
}
"""Objects of weightcast, or attributes of one, that such modules set attributes of."""


def liberties(source: str, *, is_near_others: bool = False) -> Iterator[tuple[int, str]]:
    """Each place that `PERMITTED` has to know: its line, and what is done there."""
    tree = ast.parse(source)
    aliases = imported(tree)

    def full(node: ast.expr) -> str:
        first, dot, rest = parts_of(node).partition(".")
        return aliases.get(first, first) + dot + rest if first in aliases else ""

    def is_foreign(node: ast.expr) -> bool:
        return bool(name := full(node)) and not name.startswith("weightcast.")

    for node in ast.walk(tree):
        lineno = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Attribute, ast.Name)) and any(fnmatchcase(full(node), name) for name in NAMES):
            yield lineno, full(node)
        if isinstance(node, ast.Attribute) and node.attr in BY_ADDRESS:
            yield lineno, f"uses .{node.attr}"
        for target in targets_of(node):
            inner = target.value if isinstance(target, (ast.Subscript, ast.Attribute)) else None
            if inner is not None and is_foreign(inner):
                yield target.lineno, f"sets {full(inner)}"
            elif isinstance(target, ast.Attribute) and target.attr.startswith("__"):
                yield target.lineno, f"sets {target.attr}"
            elif is_near_others and isinstance(target, ast.Attribute):
                owner = ast.unparse(target.value)
                if owner not in OWN_OBJECTS | {"self", "cls"} and f"{owner}.{target.attr}" not in OWN_OBJECTS:
                    yield target.lineno, f"sets .{target.attr} of {owner}"
            elif isinstance(target, ast.Subscript) and is_namespace(target.value):
                yield target.lineno, "sets an item of a namespace"
        if isinstance(node, ast.Call):
            called = parts_of(node.func)
            if called in ("setattr", "delattr"):
                yield lineno, f"{called}({ast.unparse(node.args[0])})"
            elif isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
                if is_namespace(node.func.value):
                    yield lineno, "changes a namespace"
                elif full(node.func.value) in (
                    "os.environ",
                    "sys.modules",
                    "sys.path",
                    "sys.meta_path",
                    "sys.path_hooks",
                ):
                    yield lineno, f"changes {full(node.func.value)}"
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ("__setattr__", "__delattr__"):
                yield lineno, ast.unparse(node.func)


def is_namespace(node: ast.expr) -> bool:
    """Whether it is what holds another object's attributes."""
    if isinstance(node, ast.Call):
        return parts_of(node.func) in ("vars", "globals", "locals")
    return isinstance(node, ast.Attribute) and node.attr in ("__dict__", "_parameters", "_buffers", "_modules")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\ntorch.library.Library('aten', 'IMPL')", "torch.library.Library"),
        ("from torch import library\nlibrary._scoped_library('aten', 'IMPL')", "torch.library._scoped_library"),
        ("from gc import disable as d\nd()", "gc.disable"),
        ("import os\nos.environ['A'] = '1'", "sets os.environ"),
        ("from os import environ\nenviron.update(A='1')", "changes os.environ"),
        ("import sys\nsys.excepthook = print", "sets sys"),
        ("import sys\nsys.modules['a'], b = 1, 2", "sets sys.modules"),
        ("import threading\nthreading.excepthook = print", "sets threading"),
        ("import torch\ntorch.Tensor.copy_ = print", "sets torch.Tensor"),
        ("import torch\nfor torch.cuda.synchronize in ():\n    pass", "sets torch.cuda"),
        ("import vllm\nsetattr(vllm.LLM, 'sleep', print)", "setattr(vllm.LLM)"),
        ("def f(model):\n    vars(model).update(a=1)", "changes a namespace"),
        ("def f(model):\n    model.__dict__['a'] = 1", "sets an item of a namespace"),
        ("def f(x):\n    x.__class__ = int", "sets __class__"),
        ("import torch\ntorch._C._set_grad_enabled(False)", "torch._C._set_grad_enabled"),
        ("def f(manager):\n    manager.sleep = print", "sets .sleep of manager"),
        ("import torch as t\nt.backends.cudnn.benchmark = True", "sets torch.backends.cudnn"),
        ("import ctypes\n(ctypes.c_ubyte * 8).from_address(id(None))", "uses .from_address"),
        ("def f(tensor):\n    return tensor._cdata", "uses ._cdata"),
    ],
)
def test_each_kind_is_found(source: str, what: str) -> None:
    assert what in {found for _, found in liberties(source, is_near_others=True)}


@pytest.mark.parametrize("module", MODULES)
def test_a_place_that_changes_what_is_not_ours_is_permitted_by_name(module: str) -> None:
    places = list(liberties(Path(MODULES[module]).read_text(), is_near_others=module.startswith(NEAR_OTHERS)))
    unknown = [
        f"{MODULES[module]}:{lineno}: {what}: remove it, or give it back in a finally and a reason in PERMITTED"
        for lineno, what in places
        if (module, what) not in PERMITTED
    ]
    assert not unknown, "\n".join(unknown)
    gone = [what for of, what in PERMITTED if of == module and what not in {found for _, found in places}]
    assert not gone, f"PERMITTED lists for {module} what is not there: {gone}"


def test_permitted_places_are_in_modules_that_are_there() -> None:
    assert {module for module, _ in PERMITTED} <= MODULES.keys()
    assert all(PERMITTED.values())
