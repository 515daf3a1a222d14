"""The kernel of `nh-128`, in Triton's interpreter, against torch: bit for bit; and which variants of it are compiled.

Needs triton (280 MB), which vLLM's environment has: `scripts/test-vllm` runs it there, and it must not be skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

IS_ELSEWHERE = all(importlib.util.find_spec(name) is None for name in ("triton", "vllm"))
pytestmark = pytest.mark.skipif(IS_ELSEWHERE, reason="triton is not installed, nor vLLM, which brings it")

CHECK = """
import torch
from weightcast.format import device_digest
from weightcast.format.device_digest import CopyAndDigest

assert device_digest.kernel(torch.device("cpu")) is not None

class OnKernel(torch.Tensor):
    is_cuda = True

def check(payload, targets, sources, num_others=0):
    expected = payload.clone()
    for target, source in zip(targets, sources):
        place = (target.data_ptr() - payload.data_ptr())
        there = expected[place : place + target.nbytes].view(target.dtype).view(target.shape)
        there.copy_(source)
    copies = CopyAndDigest(payload, targets, sources)
    assert len(copies.others) == num_others, copies.others
    for target, source in copies.others:
        target.copy_(source)
    for _ in range(2):
        assert torch.equal(copies.run(), device_digest.device_digest(expected))
    assert torch.equal(payload, expected)
    on_kernel = device_digest.device_digest(payload.as_subclass(OnKernel))
    assert torch.equal(on_kernel, device_digest.device_digest(expected))

def noise(num_bytes):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

torch.manual_seed(0)
# Lengths around those of chunks and programs; extremes of the words.
for num_words in (1, 7, 255, 256, 257, 2047, 2048, 2049, 20000):
    payload = noise(8 * num_words)
    check(payload, [payload], [noise(8 * num_words)])
    check(noise(8 * num_words), [], [])
check(torch.full((8 * 9000,), 255, dtype=torch.uint8), [], [])
words = torch.full((9000,), -(2**63))
check(words.view(torch.uint8), [], [])
# Pieces with gaps, casts, strides, odd lengths and places, sources that begin in the middle of a word, empty ones.
payload = noise(1 << 18)
at = lambda start, num, dtype: payload[start : start + num * dtype.itemsize].view(dtype)
targets = [
    at(0, 1000, torch.float32), at(4096, 33, torch.bfloat16), at(8192, 70000 // 8, torch.int64),
    at(90112, 512, torch.bfloat16).view(16, 32), at(98304, 16, torch.uint8), at(98320, 8, torch.uint8),
    at(120000, 0, torch.int8),
]
sources = [
    torch.randn(1000), torch.randn(33).bfloat16(), torch.randint(-9, 9, (70000 // 8,)),
    torch.randn(32, 16).bfloat16().t(), noise(17)[1:], noise(8), noise(0).view(torch.int8),
]
check(payload, targets, sources, num_others=3)
payload = noise(4096)
check(payload, [payload[:256].view(torch.bfloat16)], [torch.randn(128)], num_others=1)
print("bit for bit")
"""


def test_the_kernels_digests_and_copies_are_torchs_bit_for_bit() -> None:
    """In a process of its own: the interpreter is chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.stdout == "bit for bit\n", done.stderr


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightcast.format.digest_kernel import _copy_and_digest

signature = {"bucket": "*i64", "partial": "*i64", "num_words": "i32", "steps": "*i64", "segments": "*i64"}
for has_table in (True, False):
    constants = {"HAS_TABLE": has_table, "PROGRAM_STEPS": 4, "STEP_CHUNKS": 8, "CHUNK_WORDS": 256}
    source = ASTSource(_copy_and_digest, signature | dict.fromkeys(constants, "constexpr"), constants)
    for capability in (80, 90):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
        assert compiled["cubin"]
        # A product of 32 x 32 bits is one instruction of a GPU; of 64 x 64 it is several.
        assert compiled["ptx"].count(".wide.u32") >= 16, compiled["ptx"]
print("compiled")
"""


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """For A100 and H100 or H200."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout == "compiled\n", done.stderr


VARIANTS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from weightcast.format import device_digest, digest_kernel
from weightcast.format.bucket import BucketBuffer
from pretended import LazyGpu

jitted = digest_kernel._copy_and_digest
bind = create_function_from_signature(jitted.signature, jitted.params, make_backend(GPUTarget("cuda", 90, 32)))
variants, kernel = [], device_digest.kernel.__wrapped__

class Launched:
    def __getitem__(self, grid):
        return self
    def __call__(self, bucket, partial, num_words, steps, segments, has_table, program_steps, chunks, chunk_words):
        arguments = bucket, partial, num_words, steps, segments, has_table, program_steps, chunks, chunk_words
        variants.append(str(bind(*arguments)[1]))
        tables = (steps, segments) if has_table else ()
        gpu.copy_and_digest(bucket, partial, chunks * chunk_words, program_steps, *tables)

digest_kernel._copy_and_digest = Launched()
with LazyGpu() as gpu:
    launch = kernel(gpu.device)
    assert launch is digest_kernel.launch
    tried, device_digest.kernel = set(variants), lambda device: launch
    assert len(tried) == 2
    for size in (256, 1024, 2048, 16384, 16640, 1 << 20, (1 << 20) + 768, 12345600):
        payload = BucketBuffer.of(gpu.tensor(torch.zeros(256 + size, dtype=torch.uint8))).payload
        source = gpu.tensor(torch.zeros(size // 8 - 3, dtype=torch.int64))
        variants.clear()
        device_digest.device_digest(payload)
        device_digest.CopyAndDigest(payload, [payload.view(torch.int64)[:-3]], [source]).run()
        assert set(variants) == tried, (size, set(variants) - tried)
print("the variants that were tried")
"""


def test_what_is_tried_at_the_first_use_is_what_every_bucket_runs(tmp_path: Path) -> None:
    """By Triton's own keys of the launches' arguments: another key is compiled within a publish, and may fail there."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", VARIANTS], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.stdout == "the variants that were tried\n", done.stderr
