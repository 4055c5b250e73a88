"""Fine-tunes a checkpoint on a text file, on as many ranks as it is started with:

slidedp run -n 2 examples/train_torchrun.py CHECKPOINT TEXT OUTPUT
torchrun --nproc-per-node 2 examples/train_torchrun.py CHECKPOINT TEXT OUTPUT
"""

import sys

import slidedp

checkpoint, text, output = sys.argv[1:4]
args = slidedp.TrainingArguments(
    output_dir=output,
    learning_rate=1e-5,
    per_device_train_batch_size=1,
    max_seq_length=256,
    max_steps=20,
)
with slidedp.Trainer(model=checkpoint, args=args, train_dataset=text) as trainer:
    trainer.train()
    trainer.save_model()
