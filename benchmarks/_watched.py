"""`fedprune` in this process, with a second thread that looks where its processor time goes.

    python benchmarks/_watched.py FILE.json run --engine inprocess ...

FILE.json says how many CPU seconds passed below each function of the project (``within``), and in which functions that
the project's own ones had called (``own``), and by round, of which 0 is the start, how many seconds it took and how
many CPU seconds passed below which functions. It is written every few seconds, so a run may be killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from fedprune_app.cli import main
from fedprune_app.federation import loop
from fedprune_app.files import replace_file

_OURS = ("fedprune_app", "clients", "strategies")
_TICKS = os.sysconf("SC_CLK_TCK")
_HERE = Path(__file__).parents[1]


def watch(file: Path, pause_seconds: float = 0.02, write_seconds: float = 3.0) -> None:
    """Look at all threads again and again: what a thread worked since the last look belongs to where it is now."""
    within: Counter[str] = Counter()
    own: Counter[str] = Counter()
    by_round: dict[int, Counter[str]] = {}
    took: dict[int, float] = {}  # seconds, by round
    before: dict[int, float] = {}
    started = looked = written = time.monotonic()
    while True:
        time.sleep(pause_seconds)
        frames = sys._current_frames()
        number = _round_of(frames[threading.main_thread().ident or 0])
        this_round = by_round.setdefault(number, Counter())
        took[number] = took.get(number, 0.0) + time.monotonic() - looked
        looked = time.monotonic()
        for thread in threading.enumerate():
            frame, task = frames.get(thread.ident or 0), thread.native_id or 0
            worked = _cpu_seconds(task)
            seconds, before[task] = worked - before.get(task, worked), worked
            if frame is None or not seconds or thread is threading.current_thread():
                continue
            leaf, ours = frame.f_code, list[str]()
            while frame is not None:
                ours += _names(frame.f_code)
                frame = frame.f_back
            own[f"{ours[0] if ours else 'elsewhere'} > {leaf.co_name}"] += seconds
            for name in set(ours):
                within[name] += seconds
                this_round[name] += seconds
        if time.monotonic() - written > write_seconds:
            written = time.monotonic()
            told = {"seconds": written - started, "within": within.most_common(60), "own": own.most_common(40)}
            rounds = {n: {"seconds": took[n], "within": found.most_common(25)} for n, found in by_round.items()}
            told["rounds"] = rounds
            replace_file(file, json.dumps(told, indent=1).encode(), durable=False)


def _round_of(frame: FrameType | None) -> int:
    """Return the number of the round in which the server's loop is; 0 before the first, and without a loop."""
    while frame is not None and frame.f_code is not loop.run.__code__:
        frame = frame.f_back
    return 0 if frame is None else int(frame.f_locals.get("number", 0))


def _cpu_seconds(thread: int) -> float:
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _names(code: CodeType) -> list[str]:
    path = Path(code.co_filename)
    if not path.is_relative_to(_HERE):
        return []
    parts = path.relative_to(_HERE).with_suffix("").parts
    return [f"{'.'.join(parts)}:{code.co_qualname}"] if parts[0] in _OURS else []


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    sys.argv[0] = "fedprune"
    threading.Thread(target=watch, args=(file,), daemon=True).start()
    main()
