"""What `make demo` runs: a real checkpoint learns on two ranks that share one host state.

1. SmolLM2-135M-Instruct becomes a Hugging Face folder, out/smollm2 (examples/smollm2.py).
2. Python's own language reference, `pydoc_data.topics`, becomes two files of text: one for
   training, one that is held out for evaluation.
3. `slidedp run -n 2 examples/demo_train.py` fine-tunes all parameters on two ranks.
4. The losses become a picture, the samples before and after are shown.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import smollm2

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "out" / "smollm2"
OUT = ROOT / "out" / "demo"
RANKS = 2
BLOCK = 1500  # characters


def write_text() -> None:
    """train.jsonl and held_out.jsonl: {"text": ...}, a block of paragraphs a line.

    The topics repeat each other in part, so a paragraph is taken once, wherever it stands; every
    14th block is held out. No paragraph of a held-out block is ever trained on.
    """
    seen: set[str] = set()
    blocks: list[str] = []
    for name in sorted(topics):
        block: list[str] = []
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            if paragraph.strip() and paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                block.append(paragraph)
            if sum(map(len, block)) >= BLOCK:
                blocks.append("\n\n".join(block))
                block = []
        if block:
            blocks.append("\n\n".join(block))
    held_out = [block for i, block in enumerate(blocks) if i % 14 == 5]
    train = [block for i, block in enumerate(blocks) if i % 14 != 5]
    for file, texts in (("train.jsonl", train), ("held_out.jsonl", held_out)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (OUT / file).write_text(lines, encoding="utf-8")
        print(f"{OUT / file}: {len(texts)} blocks, {sum(map(len, texts)):,} characters")


def draw(result: dict[str, object], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = result["losses"]
    assert isinstance(losses, list)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="0.6", label="training, each step")
    axes.plot([0, len(losses)], [result["before"], result["after"]], "o-", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="SmolLM2-135M, Python's reference")
    axes.legend()
    figure.savefig(path, dpi=120)


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def main() -> None:
    start = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)

    heading(f"checkpoint: {CHECKPOINT}")
    if CHECKPOINT.exists():
        print("there already")
    else:
        smollm2.convert(CHECKPOINT, dtype="float32")

    heading("text: Python's language reference")
    write_text()

    script = ROOT / "examples" / "demo_train.py"
    heading(f"slidedp run -n {RANKS} {script.relative_to(ROOT)}")
    command = [sys.executable, "-m", "slidedp", "run", "-n", str(RANKS), str(script)]
    command += [str(CHECKPOINT), str(OUT)]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise SystemExit(code)

    result = json.loads((OUT / "result.json").read_text(encoding="utf-8"))
    draw(result, OUT / "loss.png")
    heading("greedy continuation, before")
    print(result["prompt"] + result["sample_before"])
    heading("greedy continuation, after")
    print(result["prompt"] + result["sample_after"])
    heading(f"{time.monotonic() - start:.0f} s")
    print(f"loss picture: {OUT / 'loss.png'}")
    print(f"fine-tuned model: {OUT / 'model'}")
    print(f"evaluation loss {result['before']:.2f} -> {result['after']:.2f}")


if __name__ == "__main__":
    main()
