"""What a run tells: a progress bar on a terminal or in a notebook, plain lines elsewhere.

Only rank 0 reports; the others' errors carry their rank.
"""

import sys
import time
from types import TracebackType
from typing import Any, Self


def _interactive(disable: bool | None) -> bool:
    if disable is not None:
        return not disable
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def host_memory() -> int:
    """Bytes resident in this process, shared pages included."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return 0


def human(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


class Report:
    """Progress of one thing with a known length; silent on ranks other than 0."""

    def __init__(self, what: str, total: int, rank: int, disable: bool | None) -> None:
        self.what, self.total, self.quiet = what, total, rank != 0
        self.bar = not self.quiet and _interactive(disable)
        self.progress: Any = None
        self.task: Any = None
        self.said = 0.0

    def __enter__(self) -> Self:
        if self.bar:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self.progress.start()
            self.task = self.progress.add_task(self.what, total=self.total, text="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def update(self, done: int, text: str = "", *, line: bool = False) -> None:
        """The state now; `line`: worth a line where there is no bar."""
        if self.quiet:
            return
        if self.progress is not None:
            self.progress.update(self.task, completed=done, text=text)
        elif line:
            print(f"{self.what} {done}/{self.total}  {text}".rstrip(), flush=True)

    def bytes(self, done: int, total: int) -> None:
        """Progress in bytes: the bar, or a line at the start of every fifth second and the end."""
        if self.quiet:
            return
        if self.progress is not None:
            self.progress.update(self.task, completed=done, total=total, text=human(total))
            return
        now = time.monotonic()
        if done == total or now - self.said >= 5:
            self.said = now
            print(f"{self.what} {human(done)} of {human(total)}", flush=True)
