# SPDX-License-Identifier: Apache-2.0
"""Worker processes: several jobs at once, on the cores of a CPU or on one GPU with enough memory.

Jobs, answers and progress are lines of JSON between the processes; nothing is pickled. Jobs that
share a cache are kept apart by its locks. A process that dies loses the job that it was at, not the
others.
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

Job = dict[str, Any]  # values that JSON can represent
Answer = dict[str, Any]
Work = Callable[[Job, Reporter], Answer]


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerLostError(Exception):
    """A worker process ended in the middle of a job."""


class WorkerPool:
    """Worker processes that share jobs, for as long as the `with` block lasts."""

    def __init__(self, work: str, jobs: int, lane: Callable[[int], Reporter], threads: int = 0) -> None:
        """Prepare the processes; each starts when it is needed.

        Args:
            work: the function that does a job, as `package.module:function`.
            jobs: how many processes.
            lane: gives, for the number of a process, the reporter of its progress.
            threads: torch's threads in each process; 0 leaves torch's own choice.
        """
        self._workers = [Worker(work, threads, lane(number)) for number in range(jobs)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.retire()

    def run(self, tasks: Sequence[Job]) -> Iterator[tuple[int, Answer | WorkerLostError]]:
        """Yield the answer to each job, with the job's number, as they are ready."""
        waiting = queue.Queue[tuple[int, Job]]()
        answers = queue.Queue[tuple[int, Answer | WorkerLostError]]()
        for numbered in enumerate(tasks):
            waiting.put(numbered)

        def serve(worker: Worker) -> None:
            with suppress(queue.Empty):
                while not worker.retired:
                    number, task = waiting.get_nowait()
                    try:
                        answers.put((number, worker.answer(task)))
                    except Exception as error:  # whatever it is, the caller waits for an answer
                        worker.close()
                        answers.put((number, WorkerLostError(f"the process at work on it cannot be used ({error}).")))

        for worker in self._workers:
            threading.Thread(target=serve, args=(worker,), daemon=True).start()
        for _ in tasks:
            yield answers.get()


class Worker:
    """A process that does one job after the other; it is started, and restarted, when needed."""

    def __init__(self, work: str, threads: int, reporter: Reporter) -> None:
        self._command = [sys.executable, "-m", "fedquit.studies.workers", work, str(threads)]
        self._reporter = reporter
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # one thread starts the process, another may end it
        self.retired = False

    def answer(self, task: Job) -> Answer | WorkerLostError:
        process = self._running()
        with suppress(BrokenPipeError):
            _write(cast("IO[str]", process.stdin), task)
        for line in cast("IO[str]", process.stdout):
            message = json.loads(line)
            if "answer" in message:
                return dict(message["answer"])
            getattr(self._reporter, message["report"])(*message["of"])
        self.close()
        return WorkerLostError(
            f"the process at work on it ended with {process.returncode}: if memory ran out, take fewer --jobs."
        )

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self.retired:
                raise WorkerLostError("nothing begins once the work is over")
            if self._process is None:
                pipe = subprocess.PIPE
                paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
                env = {**os.environ, "PYTHONPATH": paths}  # so that it can import what a recipe names
                self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, env=env)
            return self._process

    def retire(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self.retired = True
        self.close()

    def close(self) -> None:
        """End the process; the next job starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # all that matters is on disk, whole
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):  # a thread may still be reading
                cast("IO[str]", stream).close()


def _write(stream: IO[str], message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


class _PipeReporter:
    """A reporter that sends its calls to the parent process."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        _write(self._pipe, {"report": "phase", "of": [title, rounds, done]})

    def round(self, done: int, note: str) -> None:
        _write(self._pipe, {"report": "round", "of": [done, note]})


def main(work: str, threads: int) -> None:
    """Do the jobs that arrive on the standard input, line by line, until it is closed.

    Args:
        work: the function that does a job, as `package.module:function`, or a class whose instance does.
        threads: torch's threads; 0 leaves torch's own choice.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to the standard error stream, not between the lines of JSON
    named = imported(work, "work")
    do = cast("Work", named() if isinstance(named, type) else named)
    jobs = queue.SimpleQueue[str]()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)  # the parent has ended, perhaps killed: a job that is half done must not hold its locks any longer

    threading.Thread(target=listen, daemon=True).start()
    while True:
        _write(pipe, {"answer": do(json.loads(jobs.get()), _PipeReporter(pipe))})


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the parent has ended
        main(sys.argv[1], int(sys.argv[2]))
