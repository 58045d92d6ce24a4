# SPDX-License-Identifier: Apache-2.0
"""Several pieces of work at once, each in a process of its own: on the cores of a CPU, or on one GPU that has room.

Tasks, answers and progress are lines of JSON between the processes; nothing is pickled. Work that shares a cache finds
its locks there. A process that dies costs the task that it was at, not the others.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from fedquit.running.training_cache import Reporter
from fedquit.utils.names import imported

Job = dict[str, Any]  # what JSON can say
Answer = dict[str, Any]
Work = Callable[[Job, Reporter], Answer]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerLostError(Exception):
    """A process ended in the middle of a task."""


class WorkerPool:
    """Some processes that share work, for as long as the `with` lasts."""

    def __init__(self, work: str, jobs: int, lane: Callable[[int], Reporter], threads: int = 0) -> None:
        """Prepare the processes; each starts when it is needed.

        Args:
            work: the function that does a task, as `package.module:function`.
            jobs: how many processes.
            lane: who wants to know how far each process is.
            threads: torch's, in each process; 0 leaves them as they are.
        """
        self._workers = [_Worker(work, threads, lane(number)) for number in range(jobs)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.retire()

    def run(self, tasks: Sequence[Job]) -> Iterator[tuple[int, Answer | WorkerLostError]]:
        """The answer to each task, with the task's number, as they come."""
        waiting, answers = queue.Queue[tuple[int, Job]](), queue.Queue[tuple[int, Answer | WorkerLostError]]()
        for numbered in enumerate(tasks):
            waiting.put(numbered)

        def serve(worker: _Worker) -> None:
            with suppress(queue.Empty):
                while not worker.retired:
                    number, task = waiting.get_nowait()
                    try:
                        answers.put((number, worker.answer(task)))
                    except Exception as error:  # whatever it is, somebody waits for an answer
                        worker.close()
                        answers.put((number, WorkerLostError(f"the process at work on it cannot be used ({error}).")))

        for worker in self._workers:
            threading.Thread(target=serve, args=(worker,), daemon=True).start()
        for _ in tasks:
            yield answers.get()


class _Worker:
    """A process that does one task after the other; it is started when it is needed, and again when it has died."""

    def __init__(self, work: str, threads: int, reporter: Reporter) -> None:
        self._command, self._reporter = [sys.executable, "-m", "fedquit.studies.workers", work, str(threads)], reporter
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # one thread starts the process, another may end it
        self.retired = False

    def answer(self, task: Job) -> Answer | WorkerLostError:
        process = self._running()
        with suppress(BrokenPipeError):
            _say(cast("IO[str]", process.stdin), task)
        for line in cast("IO[str]", process.stdout):
            said = json.loads(line)
            if "answer" in said:
                return dict(said["answer"])
            getattr(self._reporter, said["report"])(*said["of"])
        self.close()
        return WorkerLostError(f"the process at work on it ended with {process.returncode}: was its memory enough?")

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self.retired:
                raise WorkerLostError("nothing begins once the work is over")
            if self._process is None:
                pipe, paths = subprocess.PIPE, os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
                own = {**os.environ, "PYTHONPATH": paths}  # so that it finds what a recipe names, as we do
                self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, env=own)
            return self._process

    def retire(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self.retired = True
        self.close()

    def close(self) -> None:
        """End the process; the next task starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # all that matters is on disk, whole
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):  # a thread may still be reading
                cast("IO[str]", stream).close()


def _say(stream: IO[str], what: Mapping[str, Any]) -> None:
    stream.write(json.dumps(what) + "\n")
    stream.flush()


class _Told:
    """A reporter whose words go up the pipe."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """A phase begins, or goes on."""
        _say(self._pipe, {"report": "phase", "of": [title, rounds, done]})

    def round(self, done: int, note: str) -> None:
        """A round is over."""
        _say(self._pipe, {"report": "round", "of": [done, note]})


def main(work: str, threads: int) -> None:
    """Do what comes in, line by line, for as long as somebody is there who asks."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not disturb the lines
    do, tasks = cast("Work", imported(work, "work")), queue.SimpleQueue[str]()

    def listen() -> None:
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)  # who asked has gone, perhaps killed: what is half done must not hold its locks any longer

    threading.Thread(target=listen, daemon=True).start()
    while True:
        _say(pipe, {"answer": do(json.loads(tasks.get()), _Told(pipe))})


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):  # who asked has gone: there is nobody to tell
        main(sys.argv[1], int(sys.argv[2]))
