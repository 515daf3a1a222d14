"""A GPU without hardware, for tests of order: what a stream is given is done only once that stream is waited for.

Memory of the device is host memory of a tensor type that says it is on `cuda:0`. Invariants: a result whose stream
nobody has waited for holds bytes of 0xCC, and a write has not happened, so that a wait that is missing is found every
time, where real hardware is mostly fast enough; the default stream is shared by all threads, other streams never wait
for it unless told to; nothing is ever faster or slower by chance.

    with LazyGpu() as gpu:
        weights = gpu.tensor(torch.ones(8))      # is_cuda, on gpu.device
        ...                                      # code that goes by weightcast.host.device
        gpu.read(weights)                        # what the memory holds now: waits for nothing

Not found: memory that is freed too early, and order between GPUs. While a block is open torch's factories make memory
of this device in every thread; one at a time in a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pretended.fake_libcuda import FakeLibcuda
from weightcast.format import device_digest
from weightcast.format.bucket_digest import torch_digest
from weightcast.host import device as host_device
from weightcast.host.deadline import Deadline
from weightcast.host.device_memory import DeviceMemory

POISON = 0xCC
PATIENCE_SECONDS = 60.0
"""A wait of the host that takes longer is taken for one that would never end."""
_CHUNK_ELEMENTS, _KERNEL_CHUNKS, _KERNEL_TENSORS = 1 << 16, 320, 64
"""Of a batch's tensors, what one kernel of torch's takes (MultiTensorApply.cuh, two lists)."""
_IN_BATCHES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e5m2fnuz,
}  # fmt: skip
"""The dtypes that torch's batch copy of alike tensors on a GPU knows (ForeachBinaryOpList.cu)."""
_POLL_SECONDS = 0.001
_FACTORIES = ("empty", "zeros", "arange")
_WAITING = ("item", "tolist", "equal", "__bool__", "__int__", "__float__")
"""Calls that bring values to the host."""
_open: list[LazyGpu] = []

Operation: TypeAlias = Callable[[], bool]
"""Does its work and returns True; or False: not yet, ask again."""


class LazyStream:
    """As torch.cuda.Stream."""

    def __init__(self, gpu: LazyGpu) -> None:
        self._gpu = gpu
        self.operations: deque[Operation] = deque()
        self.num_given = 0
        self.num_done = 0
        gpu.streams.append(self)

    def give(self, operation: Operation) -> None:
        with self._gpu.lock:
            self.operations.append(operation)
            self.num_given += 1

    def wait_stream(self, other: LazyStream) -> None:
        LazyEvent(other).wait(self)

    def synchronize(self) -> None:
        self._gpu._use(self._gpu.device)
        LazyEvent(self).synchronize()


class LazyEvent:
    """As torch.cuda.Event. A question for it does what can be done by now."""

    def __init__(self, stream: LazyStream) -> None:
        self.record(stream)

    def record(self, stream: LazyStream) -> None:
        self._stream, self._position = stream, stream.num_given

    def wait(self, stream: LazyStream) -> None:
        """Have `stream` wait; the caller does not."""
        event = LazyEvent(self._stream)
        event._position = self._position
        stream.give(event.query)

    def query(self) -> bool:
        return self._stream._gpu.run(self._stream, self._position)

    def synchronize(self) -> None:
        self._stream._gpu.wait_until(self.query)


class LazyGpu:
    """The device, and what is asked in place of torch.cuda. `num_launches`: calls that gave a stream something to do.

    `num_kernels`: of how many kernels and transfers torch makes these, since a batch of copies is one call.
    `num_waits`: how often the host has waited. `num_read_bytes`, `num_written_bytes`: of its memory, by what was
    launched. `pinned_bytes`: of host memory that it reads and writes itself, given out so far. `has_kernel`: Triton is
    installed. `free_bytes`: larger allocations fail. `libcuda`: its driver. `index`: a thread's current device is 0 at
    first, and Triton's kernels are launched on the current one. `is_capturing`: a thread captures a graph, others can't
    allocate unless the driver has been told. `contexts`: the GPUs on which this process has a context, by index; there
    are `index + 1` of them, and only `device` has memory and streams here.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.lock = threading.RLock()
        self.streams: list[LazyStream] = []
        self.free_bytes = 1 << 40
        self.num_launches = 0
        self.num_kernels = 0
        self.num_waits = 0
        self.num_read_bytes = 0
        self.num_written_bytes = 0
        self.pinned_bytes = 0
        self.has_kernel = True
        self.is_capturing = False
        self.contexts: set[int] = set()
        self.libcuda = FakeLibcuda(lambda: self.free_bytes, index + 1)
        self.Stream: Callable[[torch.device], LazyStream] = lambda device: LazyStream(self)
        self.Event: Callable[[], LazyEvent] = lambda: LazyEvent(self.default_stream)
        self.default_stream = LazyStream(self)
        self._storages: dict[int, torch.UntypedStorage | None] = {}
        """All of its memory, by address; kept, so that no address comes again. None: mapped by the driver."""
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._local = threading.local()
        self._undo = contextlib.ExitStack()
        self._has_gone = False

    def __enter__(self) -> LazyGpu:
        assert not _open, "one at a time"
        _open.append(self)
        self._replace(host_device, "cuda", self)
        self._replace(host_device, "driver", lambda: self.libcuda)
        self._replace(host_device, "tensor_of", self._tensor_of)
        self._replace(device_digest, "kernel", lambda device: self.copy_and_digest if self.has_kernel else None)
        self._replace(torch.cuda, "device_of", lambda tensor: self._on_device())
        for name in _FACTORIES:
            self._replace(torch, name, functools.partial(self._made, getattr(torch, name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Whoever waits for it still is told that it has gone."""
        self._has_gone = True
        self._undo.close()
        _open.remove(self)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    # --- for tests ---

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in this device's memory, there at once."""
        return self._own(values.detach().clone())

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of what the memory holds now."""
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(torch.Tensor).clone()

    def hold(self, stream: LazyStream) -> threading.Event:
        """Give `stream` a kernel that runs until the event is set."""
        over = threading.Event()
        stream.give(over.is_set)
        return over

    # --- what is asked in place of torch.cuda ---

    def _use(self, device: torch.device) -> None:
        """A call of the runtime for that GPU: it has a context from here on, which is the thread's."""
        self.contexts.add(self.current_index if device == torch.device("cuda") else device.index)
        self.libcuda.make_current()

    def is_initialized(self) -> bool:
        return True

    def current_stream(self, device: torch.device | None = None) -> LazyStream:
        device = device or self.device
        self.contexts.add(self.current_index if device == torch.device("cuda") else device.index)
        stream: LazyStream = getattr(self._local, "stream", self.default_stream)
        return stream

    @contextlib.contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        former = self.current_stream(self.device)
        self._local.stream = stream
        try:
            with self._on_device():
                yield
        finally:
            self._local.stream = former

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        former = self.current_index
        self._local.index = self.device.index
        try:
            yield
        finally:
            self._local.index = former

    @property
    def current_index(self) -> int:
        """The thread's current device."""
        index: int = getattr(self._local, "index", 0)
        return index

    def synchronize(self, device: torch.device) -> None:
        self._use(device)
        events = [LazyEvent(stream) for stream in self.streams]
        self.wait_until(lambda: all(event.query() for event in events))

    def set_device(self, device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"expected a device with an index, found {device}")
        assert device == self.device
        if device.index != self.current_index:
            # Of the current one torch calls nothing.
            self._local.index = device.index
            self._use(device)

    def current_device(self) -> int:
        return self.current_index

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self._use(device)
        return self.free_bytes, 1 << 40

    def empty_cache(self) -> None:
        """Nothing is cached."""
        if self.is_capturing:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def device_count(self) -> int:
        return self.device.index + 1

    def get_device_properties(self, device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(uuid=f"GPU-lazy-{device.index}")

    def _tensor_of(self, memory: DeviceMemory) -> torch.Tensor:
        address, _ = memory.__cuda_array_interface__["data"]
        data = (ctypes.c_ubyte * memory.size_bytes).from_address(address)
        data.memory = memory  # type: ignore[attr-defined]
        self._storages[address] = None
        weakref.finalize(memory, self._storages.pop, address).atexit = False
        return torch.frombuffer(data, dtype=torch.uint8).as_subclass(LazyTensor)

    # --- operations ---

    def run(self, stream: LazyStream, position: int) -> bool:
        """Do what a stream was given up to there, as far as that goes now; whether all of it is done."""
        with self.lock, torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            while stream.num_done < position:
                operation = stream.operations[0]
                if not operation():
                    return False
                stream.operations.popleft()
                stream.num_done += 1
                # Now, when all is counted: its memory may go with it, which waits for this device.
                del operation
            return True

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        self.num_waits += 1
        for _ in Deadline(PATIENCE_SECONDS).polls(_POLL_SECONDS, _POLL_SECONDS):
            if is_done():
                return
            if self._has_gone:
                break
        raise AssertionError("a wait for the GPU, without a deadline, for what does not come")

    def launch(self, call: Callable[[], object], num_kernels: int = 1) -> None:
        """Give the thread's stream an operation that is done whenever it is run."""

        def operation() -> bool:
            call()
            return True

        self.num_launches += 1
        self.num_kernels += num_kernels
        self.current_stream(self.device).give(operation)

    def copy_and_digest(
        self,
        bucket: torch.Tensor,
        partial: torch.Tensor,
        step_words: int,
        program_steps: int,
        steps: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> None:
        """What `format.digest_kernel` does, with the words that the tables name when its turn comes."""
        assert self.current_index == self.device.index, "launched on another device"

        def run() -> None:
            num_words = bucket.numel()
            assert partial.shape[0] == -(-num_words // (step_words * program_steps))
            rows = [[bucket.data_ptr(), 0, num_words, 0]] if segments is None else segments.view(-1, 4).tolist()
            ends = [base + size for _, base, size, _ in rows]
            assert [base for _, base, _, _ in rows] == [0, *ends[:-1]]
            assert ends[-1] == num_words
            if steps is not None:
                assert steps.numel() == 2 * program_steps * partial.shape[0]
                for number, (first, last) in enumerate(steps.view(-1, 2).tolist()):
                    start, end = (min(each * step_words, num_words) for each in (number, number + 1))
                    assert start == end or rows[first][1] <= start < end <= ends[last - 1]
            for address, base, size, is_copied in rows:
                if is_copied:
                    memory = (ctypes.c_longlong * size).from_address(address)
                    bucket[base : base + size] = torch.frombuffer(memory, dtype=torch.int64)
                    self.num_written_bytes += 8 * size
            partial.zero_()
            partial[0] = torch_digest(bucket.as_subclass(torch.Tensor))
            self.num_read_bytes += 8 * num_words

        self.launch(run)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this device's memory."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in pinned host memory, which this device reads and writes when the operation's turn comes."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._storages[storage.data_ptr()] = storage
        return tensor.as_subclass(LazyTensor)

    def _made(self, factory: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """torch's factories: on this device the values come when its turn is."""
        is_pinned = kwargs.pop("pin_memory", False)
        is_on_host = torch.device(kwargs.get("device") or "cpu").type != "cuda"
        if self.is_capturing and not self.libcuda.is_relaxed and (is_pinned or not is_on_host):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if is_pinned:
            made = factory(*args, **kwargs)
            _poison(made)
            self.pinned_bytes += made.nbytes
            self._pinned[made.untyped_storage().data_ptr()] = made.untyped_storage()
            return made
        if is_on_host:
            return factory(*args, **kwargs)
        self._use(self.device)
        values = factory(*args, **{**kwargs, "device": "cpu"})
        if values.nbytes > self.free_bytes:
            raise torch.OutOfMemoryError(f"{values.nbytes} bytes on a GPU with {self.free_bytes}")
        made = values.clone()
        _poison(made)
        if factory.__name__ != "empty":
            self.launch(lambda: made.copy_(values))
        return self._own(made)

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A torch function of a tensor of this device."""
        name = function.__name__
        if name == "__get__" and function.__self__.__name__ in ("device", "is_cuda", "is_cpu"):
            return {"device": self.device, "is_cuda": True, "is_cpu": False}[function.__self__.__name__]
        if name == "numpy":
            raise TypeError("a tensor on cuda:0 can't be converted to numpy: copy it to the host first")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _WAITING or name == "cpu" or (name == "to" and _names_host((*args, *kwargs.values()))):
                self.current_stream(self.device).synchronize()
            if name == "cpu":
                return args[0].as_subclass(torch.Tensor).clone()
            if name == "to" and _names_host((*args, *kwargs.values())):
                kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
                return function(args[0].as_subclass(torch.Tensor).clone(), *args[1:], **kwargs)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            with _Queue(self):
                result = function(*args, **kwargs)
            return tree_map(self._returned, result)

    def _returned(self, value: Any) -> Any:
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor)
        return value.as_subclass(LazyTensor) if is_plain and self.has(value) else value


def _poison(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())


def _names_host(values: Any) -> bool:
    return any(torch.device(value).type == "cpu" for value in values if isinstance(value, str | torch.device))


class LazyTensor(torch.Tensor):
    """A tensor in a LazyGpu's memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _open:
            return _open[0].call(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class _Queue(TorchDispatchMode):
    """Gives every operation to the thread's stream, but for those that only make views."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, which takes each process longer than most tests."""
        return False

    def __init__(self, gpu: LazyGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs, schema = self._gpu, kwargs or {}, func._schema
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if not written:
            result = func(*args, **kwargs)
            if any(returned.alias_info is not None for returned in schema.returns):
                return result
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            gpu.num_read_bytes += self._num_bytes((args, kwargs))
            gpu.num_written_bytes += sum(tensor.nbytes for tensor in made)
            for tensor in made:
                gpu._own(tensor)
                _poison(tensor)

            def compute() -> None:
                values = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for tensor, value in zip(made, values, strict=True):
                    tensor.copy_(value)

            gpu.launch(compute)
            return result
        targets = [leaf for name in written for leaf in tree_leaves(named[name])]
        gpu.num_written_bytes += self._num_bytes(targets)
        gpu.num_read_bytes += self._num_bytes((args, kwargs)) - self._num_bytes(targets)
        host = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and not gpu.has(leaf)]
        is_waited_for = not named.get("non_blocking") or not all(map(gpu.is_pinned, host))
        if is_waited_for and not all(map(gpu.has, targets)):
            # To the host: the caller waits for the stream, as torch has it do, once for each tensor.
            for _ in targets:
                gpu.current_stream(gpu.device).synchronize()
            return func(*args, **kwargs)
        if is_waited_for:
            # What lies in host memory is read now.
            args = tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) and not gpu.has(a) else a, args)
        is_batch = schema.name == "aten::_foreach_copy_"
        num_kernels = _num_batch_kernels(args[0], args[1]) if is_batch else 1
        gpu.launch(functools.partial(_copy_as_old_torch if is_batch else func, *args, **kwargs), num_kernels)
        if host and "non_blocking" in named and not named["non_blocking"]:
            # From the host: torch waits as well, once for each tensor.
            for _ in host:
                gpu.current_stream(gpu.device).synchronize()
        return args[0] if schema.returns else None

    def _num_bytes(self, arguments: Any) -> int:
        """Of what lies in this device's memory."""
        leaves = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        return sum(leaf.nbytes for leaf in leaves if self._gpu.has(leaf))


def _num_batch_kernels(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
    """Of how many kernels or transfers torch makes a batch of copies: one for each tensor, unless all are alike.

    Raises RuntimeError where these are of a dtype that is not known there.
    """
    gpu = _open[0]
    is_fast = (
        all(map(gpu.has, (*targets, *sources)))
        and len({(target.dtype, source.dtype) for target, source in zip(targets, sources, strict=True)}) == 1
        and all(t.stride() == s.stride() and t.shape == s.shape for t, s in zip(targets, sources, strict=True))
    )
    if is_fast and (unknown := {targets[0].dtype, sources[0].dtype} - _IN_BATCHES):
        raise RuntimeError(f'"foreach_tensor_copy" not implemented for {unknown.pop()}')
    sizes = [target.numel() for target in targets if target.numel()]
    return num_chunked_kernels(sizes) if is_fast else len(sizes)


def num_chunked_kernels(sizes: Sequence[int]) -> int:
    """Kernels of a batch of alike tensors of so many elements, as torch's multi_tensor_apply launches them."""
    num_kernels = num_chunks = num_tensors = 0
    for size in sizes:
        num_tensors += 1
        for start in range(0, size, _CHUNK_ELEMENTS):
            num_chunks += 1
            is_last = start + _CHUNK_ELEMENTS >= size
            if num_chunks == _KERNEL_CHUNKS or (is_last and num_tensors == _KERNEL_TENSORS):
                num_kernels += 1
                # A tensor that is not whole yet goes on in the next one.
                num_chunks, num_tensors = 0, 0 if is_last else 1
    return num_kernels + bool(num_chunks)


def _copy_as_old_torch(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
    """torch before 2.11 spoils targets of several dtypes, where all sources are of one (pytorch#173383)."""
    torch._foreach_copy_(targets, sources)
    if len({source.dtype for source in sources}) == 1:
        for target in targets:
            if target.dtype != targets[0].dtype:
                target.view(torch.uint8).fill_(POISON)
