"""A signal in the middle of a long step: `extension_signals.py interrupt|handler|thread`.

Prints how the call ended and how many seconds after the signal. The step would last minutes.
"""

import os
import signal
import sys
import threading
import time

import numpy as np
from extension_tools import make_spec

from slidedp import _slidedp


class Stop(Exception):
    pass


def on_alarm(number: int, frame: object) -> None:
    raise Stop("from the handler")


def main() -> None:
    mode = sys.argv[1]
    signal.signal(signal.SIGALRM, on_alarm)
    # A job that a shell put into the background starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    micro, tokens = 256, 256
    spec = make_spec(
        {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 8, "head_dim": 64, "inter": 1536},
        max_tokens=tokens,
        max_seq=tokens,
        micro_batches=micro,
        threads=1,
    )
    engine = _slidedp.Engine(spec)
    engine.init(1, 0.02)
    ids = np.arange(tokens, dtype=np.int32)[None] % 60
    batches = [{"input_ids": ids, "labels": ids}] * micro
    sent = [0.0]

    def send() -> None:
        time.sleep(1.0)
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGALRM if mode == "handler" else signal.SIGINT)

    if mode == "thread":  # the signal is the main thread's; the step runs in another and goes on
        failure: list[BaseException] = []
        ended = threading.Event()  # a join that a signal broke off can't be repeated in Python 3.11

        def step() -> None:
            try:
                engine.step(batches, 1e-3)
            except BaseException as error:
                failure.append(error)
            ended.set()

        threading.Thread(target=send).start()
        threading.Thread(target=step).start()
        try:
            ended.wait()
        except KeyboardInterrupt:
            print(f"KeyboardInterrupt {time.monotonic() - sent[0]:.3f}", flush=True)
        engine.abort("stopped by the main thread")
        ended.wait()
        print(type(failure[0]).__name__, failure[0], flush=True)
        return
    threading.Thread(target=send).start()
    try:
        engine.step(batches, 1e-3)
        print("finished")
    except BaseException as error:
        print(f"{type(error).__name__} {time.monotonic() - sent[0]:.3f}", flush=True)
    try:
        engine.step([], 1e-3)
    except RuntimeError as error:
        print(error, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
