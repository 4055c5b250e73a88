"""A rank of the demo: `slidedp run -n 2 examples/demo_train.py CHECKPOINT FOLDER`.

FOLDER has train.jsonl and held_out.jsonl; the fine-tuned checkpoint and result.json, which demo.py
shows, are put beside them. FP32 throughout: a CPU without BF16 arithmetic only emulates it.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import slidedp

PROMPT = "The try statement specifies exception handlers"
SAMPLE = 40  # tokens


def greedy(trainer: slidedp.Trainer, tokenizer: Tokenizer) -> str:
    """The likeliest continuation, token by token, each from all tokens before it."""
    ids = tokenizer.encode(PROMPT).ids
    start = len(ids)
    for _ in range(SAMPLE):
        logits = trainer.logits(np.array([ids]))
        ids.append(int(logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:]))


def main() -> None:
    checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    args = slidedp.TrainingArguments(
        output_dir=folder / "model",
        device="cpu",
        bf16=False,
        activations="keep",
        max_seq_length=256,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=4,
        max_steps=52,
        learning_rate=2e-4,
        adam_beta2=0.95,
        lr_scheduler_type="linear",
        warmup_steps=5,
        ddp_timeout=600,
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    with slidedp.Trainer(
        model=checkpoint,
        args=args,
        train_dataset=folder / "train.jsonl",
        eval_dataset=folder / "held_out.jsonl",
    ) as trainer:
        first = trainer.rank.first

        def look(when: str) -> tuple[float, str]:
            loss = trainer.evaluate()["eval_loss"]
            sample = greedy(trainer, tokenizer) if first else ""
            if first:
                print(f"{when}: evaluation loss {loss:.4f}", flush=True)
            return loss, sample

        before, sample_before = look("before")
        trainer.train()
        after, sample_after = look("after")
        trainer.save_model(folder / "model")
        if first:
            result = {
                "before": before,
                "after": after,
                "losses": [entry["loss"] for entry in trainer.history if "loss" in entry],
                "prompt": PROMPT,
                "sample_before": sample_before,
                "sample_after": sample_after,
            }
            (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
