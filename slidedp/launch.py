"""`slidedp run -n N script.py`: starts N ranks on this machine, as torchrun does, and looks after
them: signals go to all of them, and when one fails the others are ended too."""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

GRACE = 6.0  # seconds that the others have to end by themselves, with their own message
POLL = 0.05
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(world: int, command: Sequence[str]) -> int:
    """Runs `command` (a script and its arguments) in `world` processes. Returns the exit status: 0,
    that of the first rank that failed, or 128 + the signal that ended it or us."""
    launcher = _Launcher(world, command)
    try:
        return launcher.run()
    finally:
        launcher.kill()


class _Launcher:
    def __init__(self, world: int, command: Sequence[str]) -> None:
        self.world = world
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.command = [sys.executable, *command]
        self.signal = 0

    def run(self) -> int:
        before = {s: signal.signal(s, self._forward) for s in FORWARDED}
        try:
            self._start()
            return self._watch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        common = {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "SLIDE_RUN_ID": secrets.token_hex(8),
        }
        for rank in range(self.world):
            if self.signal or any(p.poll() for p in self.ranks):
                return  # no more of them: it has ended before it began
            env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.ranks.append(
                subprocess.Popen(
                    self.command, env=env, preexec_fn=_die_with_parent, start_new_session=True
                )
            )

    def _watch(self) -> int:
        """Waits for all; from the first failure on, only for GRACE."""
        status, end = 0, float("inf")
        said: set[int] = set()
        while len(said) < len(self.ranks):
            for rank, process in enumerate(self.ranks):
                if rank in said or process.poll() is None:
                    continue
                said.add(rank)
                code = process.returncode
                if code != 0:
                    self._say(rank, code)
                    if status == 0:
                        status = code if code > 0 else 128 - code
                        end = time.monotonic() + GRACE
            if time.monotonic() > end:
                left = [r for r in range(len(self.ranks)) if r not in said]
                names = ", ".join(f"rank {r}" for r in left)
                print(f"slidedp run: ending {names}", file=sys.stderr, flush=True)
                self.kill()
            if self.signal and end == float("inf"):
                end = time.monotonic() + GRACE
            time.sleep(POLL)
        if self.signal:
            return 128 + self.signal
        return status

    def _say(self, rank: int, code: int) -> None:
        if code < 0:
            how = f"died of signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"failed with exit code {code}"
        print(f"slidedp run: rank {rank} {how}", file=sys.stderr, flush=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for process in self.ranks:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: it ends stopped processes as well."""
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _die_with_parent() -> None:
    """In the child: end when the launcher is killed, so that no rank is left alone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    """A port number that nobody listens on: torch programs in the ranks may want it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
