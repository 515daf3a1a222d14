"""A trainer sharded with FSDP2 that publishes its weights after every step; the script that torchrun starts.

    torchrun --nproc-per-node 2 examples/torchrun_fsdp2.py --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001
    torchrun --nproc-per-node 2 examples/torchrun_fsdp2.py

The second form starts an engine of its own (`weightcast serve`), to try it at once; it needs no GPU. `--stay` keeps it,
so that you can ask it something (`weightcast inspect URL`, `weightcast verify DIR --engine URL`). On several hosts
start torchrun as usual (`--nnodes 2 --rdzv-backend c10d --rdzv-endpoint trainer-0:29500`): weights leave from rank 0's
host, whose address torchrun knows, and from a port that the system chooses. Needs
`pip install "PATH_TO_WEIGHTCAST[serve]"`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightcast

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def make_model(device: str) -> Qwen3ForCausalLM:
    """Every rank makes the same model, and keeps its shards of it."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    return model


def train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, device: str) -> float:
    """One step on random tokens, other ones on each rank; FSDP2 takes the mean of the gradients."""
    tokens = torch.randint(CONFIG.vocab_size, (4, 32), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def save(model: Qwen3ForCausalLM, directory: Path) -> None:
    """A model directory: `weightcast serve` takes it, `weightcast verify` compares an engine with it. A collective."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        CONFIG.save_pretrained(directory)
        weights.pop("lm_head.weight", None)  # tied to the embedding
        save_file(weights, directory / "model.safetensors")


@contextlib.contextmanager
def engine_of_our_own() -> Iterator[str]:
    """A reference server with random weights; it ends with the pipe that is its stdin."""
    with contextlib.ExitStack() as stack:
        with tempfile.TemporaryDirectory() as directory:
            CONFIG.save_pretrained(directory)
            serve = [sys.executable, "-m", "weightcast.cli", "serve", directory, "--dtype", "float32", "--port", "0"]
            command = [*serve, "--random-weights", "--exit-with-parent"]
            server = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert server.stdin is not None
            assert server.stdout is not None
            stack.callback(server.stdin.close)
            line = server.stdout.readline()
        if not line:
            raise RuntimeError("the engine did not start: its last words are above")
        yield line.split()[-1]  # weightcast: serving NAME at URL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="may be given several times")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the token that the engines were started with")
    parser.add_argument("--transport", choices=("gloo", "nccl"), default="gloo", help="nccl: one GPU for each rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="write the last weights there")
    parser.add_argument("--stay", action="store_true", help="keep the engine until Enter, to have a look at it")
    args = parser.parse_args()

    device = "cuda" if args.transport == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(args.transport)
    trainer_rank = dist.get_rank()

    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        engines = args.engine  # what rank 0 is given counts: it alone talks to engines
        if not engines and trainer_rank == 0:
            engines = [stack.enter_context(engine_of_our_own())]

        model = make_model(device)
        torch.manual_seed(1 + trainer_rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        publisher = stack.enter_context(
            weightcast.Publisher(
                weightcast.ModuleSource(model),
                transport=f"{args.transport}://{os.environ['MASTER_ADDR']}:0",
                engines=engines,
                token=None if args.token_file is None else args.token_file.read_text().strip(),
            )
        )
        for _ in range(args.steps):
            loss = train(model, optimizer, device)
            report = publisher.publish()  # on every rank: each sends its shards, all get the same report or error
            if trainer_rank == 0:
                print(
                    f"version {report.version}: loss {loss:.3f}, {report.num_bytes:,} bytes to "
                    f"{', '.join(report.engines)} in {1e3 * report.seconds.total:.0f} ms",
                    flush=True,
                )
        if args.checkpoint is not None:
            save(model, args.checkpoint)
        if args.stay and trainer_rank == 0:
            print("done; Enter ends it", flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main()
