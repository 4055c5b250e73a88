"""The command `slidedp`: train, run, init, env."""

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS_MAX = 64  # SLIDE_RANKS_MAX of csrc/state/host.h
USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for an error that was printed, 2 for a wrong command line, 130
    after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        return int(options.function(options, rest))
    except KeyboardInterrupt:
        print("slidedp: interrupted", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        if options.debug:
            traceback.print_exc()
        else:
            print(f"slidedp: {_rank()}{_text(error)}", file=sys.stderr)
        return 1


def _text(error: BaseException) -> str:
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
    return (str(error) or type(error).__name__) + notes


def _rank() -> str:
    import os

    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slidedp", description="Full-parameter fine-tuning on one machine."
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser(
        "train",
        help="train as a YAML file says",
        description="Trains as CONFIG says: model, train_dataset, eval_dataset, and the names of "
        "TrainingArguments; any of them can be given again as --name value. Saves into output_dir.",
    )
    train.add_argument("config", type=Path)
    train.set_defaults(function=_train)

    run = commands.add_parser("run", help="start a script in N ranks on this machine")
    run.add_argument("-n", "--ranks", type=int, required=True)
    run.add_argument(
        "script", nargs=argparse.REMAINDER, help="a script (or -m module) and its arguments"
    )
    run.set_defaults(function=_run)

    init = commands.add_parser("init", help="make a fresh checkpoint from a config.json")
    init.add_argument(
        "config", type=Path, help="config.json, or a folder with one (and a tokenizer)"
    )
    init.add_argument("folder", type=Path, help="where the checkpoint goes")
    init.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    init.add_argument("--seed", type=int, default=0)
    init.set_defaults(function=_init)

    env = commands.add_parser("env", help="what this installation finds and uses")
    env.set_defaults(function=_env)
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    from slidedp.launch import run

    if options.ranks < 1:
        raise ValueError(f"-n {options.ranks}: at least one rank")
    if options.ranks > RANKS_MAX:
        raise ValueError(f"-n {options.ranks}: at most {RANKS_MAX} ranks")
    if not options.script:
        raise ValueError("run: which script?")
    return run(options.ranks, options.script)


# ---- train ----


def read_run(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of a run: a YAML file's, then `--name value` pairs over them."""
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: a mapping of names to values is wanted")
    pairs = list(overrides)
    while pairs:
        name = pairs.pop(0)
        if not name.startswith("--"):
            raise ValueError(f"{name!r}: overrides are --name value")
        name, equals, value = name[2:].partition("=")
        if not equals:
            if not pairs:
                raise ValueError(f"--{name} has no value")
            value = pairs.pop(0)
        settings[name.replace("-", "_")] = yaml.safe_load(value)
    return _typed(settings)


def _typed(settings: dict[str, Any]) -> dict[str, Any]:
    """YAML reads 2e-5 as a string and 1 as an int; the arguments' own types decide."""
    from slidedp.arguments import TrainingArguments

    types = {field.name: field.type for field in dataclasses.fields(TrainingArguments)}
    result = {}
    for name, value in settings.items():
        if types.get(name) is float and isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"{name}={value!r}: a number is wanted") from None
        result[str(name)] = value
    return result


def _train(options: argparse.Namespace, rest: list[str]) -> int:
    from slidedp.arguments import TrainingArguments
    from slidedp.checkpoint import check_target
    from slidedp.trainer import Trainer

    settings = read_run(options.config, rest)
    if "model" not in settings:
        raise ValueError(f"{options.config}: 'model' is missing")
    model = settings.pop("model")
    train_dataset = settings.pop("train_dataset", None)
    eval_dataset = settings.pop("eval_dataset", None)
    if train_dataset is None:
        raise ValueError(f"{options.config}: 'train_dataset' is missing")
    args = TrainingArguments(**settings)
    with Trainer(model, args, train_dataset, eval_dataset) as trainer:
        check_target(Path(args.output_dir))  # before hours of training, not after
        summary = trainer.train()
        if eval_dataset is not None:
            summary.update(trainer.evaluate())
        trainer.save_model()
        if trainer.rank.first:
            print("  ".join(f"{name} {value:.6g}" for name, value in summary.items()))
            print(f"saved {args.output_dir}")
    return 0


# ---- init ----


def _init(options: argparse.Namespace, rest: list[str]) -> int:
    from slidedp.fresh import make_checkpoint

    count = make_checkpoint(options.config, options.folder, options.dtype, options.seed)
    print(f"{options.folder}: {count:,} parameters")
    return 0


# ---- env ----


def _env(options: argparse.Namespace, rest: list[str]) -> int:
    import importlib.metadata
    import platform

    from slidedp import __version__, _slidedp
    from slidedp.libraries import blas_path, nvidia_path
    from slidedp.report import human

    facts = _slidedp.env(blas_path(), nvidia_path())
    print(f"slidedp      {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("numpy", "safetensors", "tokenizers", "rich", "scipy-openblas32"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package:<12} {version}")
    print(f"isa          {facts['isa']} in use, {facts['isa_best']} is the best of this CPU")
    print(f"threads      {facts['cpus']} CPUs for this process, shared by the ranks")
    print(f"blas         {facts['blas']}")
    print(f"cuda         {facts['cuda']}")
    print(f"memory       {human(facts['memory_free'])} free, by {facts['memory_source']}")
    for name, reason in facts["backends"].items():
        print(f"backend      {name} {reason or 'works'}")
    for name, value, meaning in facts["variables"]:
        print(f"{name:<12} {value or '-':<6} {meaning}")
    return 0
