"""A rank of the fault tests: loads a checkpoint, trains a few steps, saves. Arguments: checkpoint,
output folder, number of steps. Prints a line when it got to the end."""

import sys

import numpy as np

import slidedp


def main() -> None:
    checkpoint, output, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    args = slidedp.TrainingArguments(
        output_dir=output, device="cpu", max_seq_length=16, per_device_train_batch_size=2
    )
    with slidedp.Trainer(model=checkpoint, args=args) as trainer:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            ids = rng.integers(0, 64, size=(2, 16))
            trainer.train_step({"input_ids": ids, "labels": ids})
        trainer.save_model(output)
    print("reached the end", flush=True)


if __name__ == "__main__":
    main()
