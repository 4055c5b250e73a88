"""A rank of the memory tests. Arguments: checkpoint, folder for reports, training arguments as
JSON. Writes JSON: what the process holds of the segment (PSS) and of its own, after loading and
after a step, what it held at most until it had loaded, and the plan."""

import json
import os
import sys
from pathlib import Path

import numpy as np

import slidedp


def rollup() -> dict[str, int]:
    """Bytes: PSS of the shared segment, and PSS of everything else, of this process."""
    segment = other = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            inside = "memfd:slidedp" in line
        elif line.startswith("Pss:"):
            size = int(line.split()[1]) * 1024
            segment, other = (segment + size, other) if inside else (segment, other + size)
    return {"segment": segment, "other": other}


def resident(which: str) -> int:
    """Bytes resident in this process, shared ones included: VmRSS now, VmHWM at most so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith(which))


def main() -> None:
    checkpoint, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    args = slidedp.TrainingArguments(
        output_dir=str(folder / "out"),
        device="cpu",
        max_seq_length=32,
        per_device_train_batch_size=1,
        **options,
    )
    before, at_rest = rollup(), resident("VmRSS")
    with slidedp.Trainer(model=checkpoint, args=args) as trainer:
        peak = resident("VmHWM") - at_rest
        loaded = rollup()
        ids = np.arange(32, dtype=np.int64)[None]
        trainer.train_step({"input_ids": ids, "labels": ids})
        after = rollup()
        report = {
            "before": before,
            "loaded": loaded,
            "after": after,
            "peak": peak,
            "plan": dict(trainer.plan),
        }
        (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))
        trainer.train_step({"input_ids": ids, "labels": ids})  # nobody leaves before all have read


if __name__ == "__main__":
    main()
