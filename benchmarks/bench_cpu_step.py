"""A training step on the CPU against PyTorch eager, in one run: FP32, the same model, batch,
threads and AdamW (fused in PyTorch), activations kept in both.

    python benchmarks/bench_cpu_step.py [--checkpoint DIR] [--rows 4] [--length 256] [--json FILE]

Without a checkpoint: SmolLM2-135M's shape with fresh weights. Rounds alternate, so that a change of
the machine's speed meets both; medians and the ratio of medians are printed. Needs torch and
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import slidedp
from slidedp.cli import main as slidedp_command

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def machine() -> str:
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    name = names[0].split(":", 1)[1].strip() if names else "unknown CPU"
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def fresh(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    status = slidedp_command(
        ["init", str(folder / "config.json"), str(folder / "model"), "--dtype", "float32"]
    )
    assert status == 0
    return folder / "model"


class Torch:
    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, ids: np.ndarray) -> float:
        tokens = torch.tensor(ids)
        logits = self.model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.checkpoint or fresh(Path(scratch))
        result = measure(options, folder, Path(scratch))
    print(f"\n{result['machine']}, {options.threads} threads, {result['parameters']:,} parameters,")
    print(f"{options.rows} x {options.length} tokens, FP32, medians of {options.rounds} rounds\n")
    print(f"{'':<26}{'s/step':>9}{'tokens/s':>10}{'speed':>8}")
    for name, times in result["seconds"].items():
        middle = statistics.median(times)
        speed = statistics.median(result["seconds"]["torch"]) / middle
        rate = options.rows * options.length / middle
        print(f"{name:<26}{middle:>9.3f}{rate:>10.0f}{speed:>8.2f}")
    print("\nspeed: relative to PyTorch's; 'recompute' makes the inside of each block twice")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(options: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    def arguments(activations: str) -> slidedp.TrainingArguments:
        return slidedp.TrainingArguments(
            output_dir=scratch / "out",
            device="cpu",
            bf16=False,
            threads=options.threads,
            learning_rate=1e-5,
            activations=activations,
            max_seq_length=options.length,
            per_device_train_batch_size=options.rows,
        )

    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"torch": [], "slidedp": [], "slidedp recompute": []}
    with (
        slidedp.Trainer(model=folder, args=arguments("keep")) as kept,
        slidedp.Trainer(model=folder, args=arguments("recompute")) as recomputed,
    ):
        peer = Torch(folder, options.threads)
        parameters = kept.plan["parameters"]
        vocab = kept.config.vocab_size
        for number in range(-1, options.rounds):  # one round to warm up
            ids = rng.integers(0, vocab, (options.rows, options.length))
            batch = {"input_ids": ids, "labels": ids}
            losses = []
            for name, step in (
                ("torch", lambda i=ids: peer.step(i)),
                ("slidedp", lambda b=batch: kept.train_step(b).loss),
                ("slidedp recompute", lambda b=batch: recomputed.train_step(b).loss),
            ):
                start = time.perf_counter()
                losses.append(step())
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
            print(f"round {number}: losses {' '.join(f'{x:.4f}' for x in losses)}", flush=True)
            assert max(losses) - min(losses) < 1e-3, "these are not the same training"
    return {"machine": machine(), "parameters": parameters, "seconds": seconds}


if __name__ == "__main__":
    main()
