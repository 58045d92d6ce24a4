# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: change the code in one small place, and see whether a test fails.

    python benchmarks/mutants.py              a fixed random sample; writes benchmarks/mutants.json
    python benchmarks/mutants.py --again      only those that were not killed, or whose file has changed since
    python benchmarks/mutants.py --sample 40  the first 40 of it
    python benchmarks/mutants.py --short      a few that are known to be killed, by the tests that killed them
    python benchmarks/mutants.py --list       what the sample is, without running anything

The sample follows from the sources alone: mutants are ranked by a hash of what they change, so that a change elsewhere
leaves the others in it. benchmarks/mutants.toml names those that change nothing a test could see, which are left out,
and says of each survivor why it survives.

A mutant is written into a copy of the tree. A process that has imported torch and pytest, and nothing of the package,
is forked, and runs the test files that execute the mutated line, the fastest first, up to the first failure.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mutation import NOTES, PACKAGE, ROOT, SEED, Mutant, Notes, all_mutants, sampled, target_files

RESULTS = ROOT / "benchmarks" / "mutants.json"
SAMPLE = 320
SHORT = 15
QUICK = 6.0  # seconds that the tests of a mutant in the short version may take
WANTED = 0.97  # the share of mutants that must be killed
LIMIT = 900.0  # seconds for a test file that is recorded
EVERY_TEST = "tests/**/test_*.py"
TESTS = "not slow and not faults"
PASSED, NO_TESTS = 0, 5  # pytest's exit codes
PRELOADED = (
    *("torch", "torch.func", "numpy", "scipy.stats", "scipy.optimize", "sklearn.svm", "sklearn.linear_model"),
    *("hypothesis", "pytest", "safetensors.torch", "typer", "rich.table", "jinja2", "PIL.Image", "matplotlib"),
)


# ---- running tests in a process of their own


@dataclass(eq=False)  # pytest hashes its plugins
class Failure:
    """A plugin of pytest that remembers the first test that failed."""

    test: str = ""

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest is not imported here
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401
        if report.failed and not self.test:
            self.test = report.nodeid


@dataclass
class Tree:
    """A copy of the tree, for one worker."""

    folder: Path

    @property
    def package(self) -> Path:
        return self.folder / PACKAGE

    @classmethod
    def copied(cls, folder: Path) -> Tree:
        leave = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "runs", "dist")
        return cls(Path(shutil.copytree(ROOT, folder / "tree", ignore=leave)))

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The tree with a mutant in it.

        Python takes a compiled file for that of its source if size and time agree: each mutant has a time of its own.
        """
        path = self.package / mutant.file
        source = path.read_bytes()
        times = path.stat()
        path.write_bytes(mutant.applied(source))
        os.utime(path, (times.st_atime, int(times.st_mtime) + 1 + int(mutant.rank[:6], 16)))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def tests_run(tree: Tree, tests: Sequence[str]) -> tuple[int, str]:
    """Run test files in this process, which must be a fork that ends afterwards, up to the first failure.

    Args:
        tree: where they lie.
        tests: their names below the tree.

    Returns:
        pytest's exit code, and the first test that failed.
    """
    import pytest

    sources = str(tree.folder / "src")
    os.chdir(tree.folder)
    sys.path.insert(0, sources)
    sys.argv = ["pytest"]
    os.environ["PYTHONPATH"] = sources
    failure = Failure()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", TESTS, "--no-header", "--tb=line"]
    options += [f"--basetemp={tree.folder.parent / 'temporary'}", "-o", "timeout=90"]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # plugins that are preloaded
    code = int(pytest.main([*options, *tests], plugins=[failure]))
    return code, failure.test


def in_fork(work: Callable[[], object], folder: Path, limit: float) -> object:
    """Do something in a fork of this process, and return what it returned.

    Args:
        work: returns what JSON can hold.
        folder: for what it prints and returns.
        limit: seconds; after them it and all that it started are killed.

    Returns:
        None where it ended without a result.

    Raises:
        TimeoutError: if it did not end in time.
    """
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            printed = (folder / "printed.txt").open("w", encoding="utf-8", buffering=1)
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            sys.stdout = sys.stderr = printed
            result = work()
            answer.write_text(json.dumps(result), encoding="utf-8")
            code = 0
        except BaseException:  # the fork must not go on with what its parent was doing
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"no end within {limit:.0f} s")
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it has started and left behind
    return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None


# ---- which tests execute which lines


@dataclass(frozen=True)
class Recorded:
    """What a test file does when nothing is wrong.

    Attributes:
        test: the file.
        code: pytest's exit code.
        failed: its first test that failed.
        seconds: that it took.
        lines: of each target, those executed inside of functions.
    """

    test: str
    code: int
    failed: str
    seconds: float
    lines: dict[str, list[int]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.code in (PASSED, NO_TESTS)


def record_lines(tree: Tree, test: str) -> dict[str, object]:
    """Run one test file in this fork, and note the lines of the targets that it executes inside of functions."""
    lines: dict[str, set[int]] = {str(tree.package / file): set() for file in target_files(tree.folder)}

    left: dict[CodeType, set[int]] = {}  # of each function that was called, the lines that were not executed yet

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        known = lines.get(code.co_filename)
        if known is None or code.co_name == "<module>" or "__module__" in code.co_names[:2]:
            return None  # elsewhere, or the body of a module or a class, which every import executes
        missing = left.setdefault(code, {line for _, _, line in code.co_lines() if line})

        def trace_line(inner: FrameType, event: str, _argument: object) -> Callable[..., Any]:
            known.add(inner.f_lineno)
            missing.discard(inner.f_lineno)
            return trace_line

        return trace_line(frame, event, None) if missing else None

    began = time.monotonic()
    threading.settrace(trace)
    sys.settrace(trace)
    code, failed = tests_run(tree, [test])
    sys.settrace(None)
    executed = {str(Path(file).relative_to(tree.package)): sorted(at) for file, at in lines.items() if at}
    return asdict(Recorded(test, code, failed, time.monotonic() - began, executed))


def files_of_tests(patterns: Iterable[str]) -> list[str]:
    """The test files that fit one of the patterns, below the tree."""
    paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def covering(mutant: Mutant, records: Iterable[Recorded], inside: bool) -> list[Recorded]:
    """The test files that execute a mutant's line, the fastest first.

    Args:
        mutant: which.
        records: of all test files.
        inside: whether the line is inside of a function. Otherwise every import executes it, and the tests are those
            that execute any function of the file or import it by name.
    """
    if inside:
        hit = [r for r in records if mutant.line in r.lines.get(mutant.file, ())]
    else:
        module = f"fedquit.{mutant.file.removesuffix('.py').replace('/', '.')} import"
        hit = [r for r in records if mutant.file in r.lines or module in (ROOT / r.test).read_text(encoding="utf-8")]
    return sorted(hit, key=lambda r: r.seconds)


def lines_of_functions(source: bytes) -> set[int]:
    """The lines that belong to the bodies of functions."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {line for f in functions for line in range(f.body[0].lineno, (f.end_lineno or f.lineno) + 1)}


# ---- the workers


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: its name.
        line: of its file, when it was tried.
        result: killed; timeout, or crashed: the tests did not end as they do without it; survived; or not covered:
            no test executes its line.
        by: the first test that failed.
        seconds: that it took.
    """

    mutant: str
    line: int
    result: str
    by: str = ""
    seconds: float = 0.0

    @property
    def dead(self) -> bool:
        return self.result in ("killed", "timeout", "crashed")


def own_folder(folder: Path) -> Path:
    """The folder of this worker process."""
    return folder / f"worker-{os.getpid()}"


def start_worker(folder: Path) -> None:
    """Give a worker process a copy of the tree."""
    own_folder(folder).mkdir()
    Tree.copied(own_folder(folder))


def recorded(folder: Path, test: str) -> Recorded:
    """Run one test file and note what it executes; `folder` is that of all workers."""
    tree = Tree(own_folder(folder) / "tree")
    found = in_fork(partial(record_lines, tree, test), tree.folder.parent, limit=LIMIT)
    record = Recorded(**found) if isinstance(found, dict) else Recorded(test, -1, "it ended without a result", 0.0)
    if record.passed:
        return record
    printed = (tree.folder.parent / "printed.txt").read_text(encoding="utf-8", errors="replace")
    return replace(record, failed=f"{record.failed}\n{printed[-3000:]}")


def tried(folder: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> Outcome:
    """Run the tests of a mutant.

    Args:
        folder: of all workers.
        mutant: which.
        tests: files that may notice it, in the order in which they run.
        seconds: that these take without it.
    """
    if not tests:
        return Outcome(mutant.name, mutant.line, "not covered")
    tree = Tree(own_folder(folder) / "tree")
    began = time.monotonic()
    result, failed = "crashed", ""
    with tree.changed(mutant):
        try:
            found = in_fork(partial(tests_run, tree, tests), tree.folder.parent, limit=60 + 4 * seconds)
        except TimeoutError:
            result = "timeout"
        else:
            if isinstance(found, list):
                code, failed = found
                result = "survived" if code in (PASSED, NO_TESTS) else "killed"
    return Outcome(mutant.name, mutant.line, result, failed, round(time.monotonic() - began, 1))


def preload() -> None:
    """Import what the tests import from elsewhere, so that forks need not."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@dataclass(frozen=True)
class Workers:
    """Processes that are forked from this one, each with a copy of the tree below `folder`."""

    pool: ProcessPoolExecutor
    folder: Path

    def record(self, tests: Iterable[str]) -> Iterator[Recorded]:
        return self.pool.map(partial(recorded, self.folder), tests)

    def attempt(
        self, mutants: Sequence[Mutant], tests: Iterable[Sequence[str]], seconds: Iterable[float]
    ) -> list[Outcome]:
        """Try mutants, and print what becomes of each.

        Args:
            mutants: which.
            tests: the files for each.
            seconds: that these take without a mutant.
        """
        outcomes = []
        for outcome in self.pool.map(partial(tried, self.folder), mutants, tests, seconds):
            outcomes.append(outcome)
            print(f"{outcome.result:11} {outcome.seconds:6.1f} s  {outcome.mutant}", flush=True)
        return outcomes


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Workers]:
    """Start so many processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    preload()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker, initargs=(folder,))
        with pool:
            yield Workers(pool, folder)


def require_passing(records: Iterable[Recorded]) -> None:
    """End the program if a test fails without a mutant: then a failure with one would prove nothing."""
    broken = [f"{r.test}: {r.failed or r.code}" for r in records if not r.passed]
    if broken:
        sys.exit("these tests fail without any mutant, so that nothing can be said:\n" + "\n".join(broken))


# ---- the program


def content_hash(paths: Iterable[Path]) -> str:
    """A hash of what files hold."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """A hash of each target below a tree."""
    return {
        file: hashlib.blake2b((root / PACKAGE / file).read_bytes(), digest_size=8).hexdigest()
        for file in target_files(root)
    }


def killed_before(chosen: Sequence[Mutant]) -> dict[str, Outcome]:
    """Of these mutants, those that the recorded run killed and whose files have not changed since, by name."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    same = {file for file, value in source_hashes().items() if record["sources"].get(file) == value}
    outcomes = {entry["mutant"]: Outcome(**entry) for entry in record["mutants"]}
    known = {m.name: outcomes[m.name] for m in chosen if m.name in outcomes and m.file in same}
    return {name: outcome for name, outcome in known.items() if outcome.result == "killed"}


def records_of(at_work: Workers, files: Sequence[str], cache: Path) -> list[Recorded]:
    """Record test files, except those of which `cache` has a record with the same sources and the same tests.

    Args:
        at_work: who runs them.
        files: below the tree.
        cache: the file for the records; it keeps those of these files.
    """
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    shared = content_hash([*(ROOT / "src").rglob("*.py"), *helpers])
    keys = {test: f"{shared} {content_hash([ROOT / test])}" for test in files}
    stored = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    known = {key: Recorded(**stored[key]) for key in keys.values() if key in stored}
    for record in at_work.record(test for test, key in keys.items() if key not in known):
        known[keys[record.test]] = record
        print(f"recorded {record.seconds:6.1f} s  {record.test}", flush=True)
        if record.passed:
            stored[keys[record.test]] = asdict(record)
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps({key: stored[key] for key in keys.values() if key in stored}), encoding="utf-8")
    require_passing(known.values())
    return list(known.values())


def run_sample(mutants: Sequence[Mutant], files: Sequence[str], jobs: int, cache: Path) -> list[Outcome]:
    """Try mutants with the tests that execute their lines.

    Args:
        mutants: which.
        files: the test files that may be used.
        jobs: how many processes.
        cache: for the records of which lines each test file executes.
    """
    inside = {file: lines_of_functions((ROOT / PACKAGE / file).read_bytes()) for file in target_files()}
    with workers(jobs) as at_work:
        records = records_of(at_work, files, cache)
        chosen = [covering(mutant, records, mutant.line in inside[mutant.file]) for mutant in mutants]
        tests = [[r.test for r in hits] for hits in chosen]
        seconds = [sum(r.seconds for r in hits) for hits in chosen]
        return at_work.attempt(mutants, tests, seconds)


def run_short(count: int, jobs: int) -> list[Outcome]:
    """Try mutants again that were killed, each with the test file that killed it; first these files without them."""
    killed = [Outcome(**entry) for entry in json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"]]
    by = {o.mutant: o.by.partition("::")[0] for o in killed if o.result == "killed" and o.seconds <= QUICK}
    mutants = [m for m in all_mutants() if m.name in by and (ROOT / by[m.name]).is_file()][:count]
    if not mutants:
        sys.exit(f"no mutant of {RESULTS.name} is left in the sources: run benchmarks/mutants.py anew.")
    with workers(jobs) as at_work:
        require_passing(at_work.record(sorted({by[mutant.name] for mutant in mutants})))
        tests = [[by[mutant.name]] for mutant in mutants]
        return at_work.attempt(mutants, tests, [QUICK] * len(mutants))


def summary(outcomes: Sequence[Outcome], notes: Notes) -> tuple[str, bool]:
    """What came out, in words; and whether enough were killed and every survivor is explained."""
    dead = sum(outcome.dead for outcome in outcomes)
    explained = {note.mutant for note in notes.survivor}
    alive = [outcome for outcome in outcomes if not outcome.dead]
    unexplained = [outcome.mutant for outcome in alive if outcome.mutant not in explained]
    lines = [f"{dead} of {len(outcomes)} mutants killed ({dead / len(outcomes):.1%})."]
    lines += [f"{outcome.result}: {outcome.mutant}" for outcome in alive]
    if unexplained:
        lines.append(f"{len(unexplained)} survivors are not explained in {NOTES.name}.")
    return "\n".join(lines), dead >= WANTED * len(outcomes) and not unexplained


def main() -> int:
    """Try mutants; the exit code is 1 if too many survive, or one without an explanation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=SAMPLE, help="how many mutants to try")
    parser.add_argument("--short", action="store_true", help="only some that are known to be killed")
    parser.add_argument("--again", action="store_true", help="only those that the recorded run did not kill")
    parser.add_argument("--only", default="", help="a word in the names of the mutants to try")
    parser.add_argument(
        "--tests", action="append", metavar="PATTERN", help=f"of test files; all of {EVERY_TEST} if none"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help=f"for the results; of a whole run {RESULTS.name} if none is given")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "mutants" / "records.json", help="of coverage")
    parser.add_argument("--list", action="store_true", help="print the sample and end")
    given = parser.parse_args()
    if given.short:
        outcomes = run_short(SHORT, given.jobs)
        alive = [outcome.mutant for outcome in outcomes if not outcome.dead]
        print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants killed.")
        return int(bool(alive))
    notes = Notes.read()
    mutants = all_mutants()
    known = {mutant.name for mutant in mutants}
    gone = [note.mutant for note in (*notes.equivalent, *notes.survivor) if note.mutant not in known]
    if gone:
        sys.exit(
            f"{NOTES.name} names mutants that the sources do not have any more: take them out.\n" + "\n".join(gone)
        )
    chosen = sampled([m for m in mutants if given.only in m.name], notes, given.sample)
    if given.list:
        by_file = Counter(mutant.file for mutant in chosen)
        print("\n".join(mutant.name for mutant in chosen))
        print("\n".join(f"{count:4}  {file}" for file, count in by_file.most_common()))
        print(f"{len(chosen)} of {len(mutants)} mutants of {len(target_files())} files")
        return 0
    began = time.monotonic()
    before = killed_before(chosen) if given.again else {}
    left = [mutant for mutant in chosen if mutant.name not in before]
    tried_now = run_sample(left, files_of_tests(given.tests or [EVERY_TEST]), given.jobs, given.cache)
    by_name = before | {outcome.mutant: outcome for outcome in tried_now}
    outcomes = [by_name[mutant.name] for mutant in chosen]
    words, enough = summary(outcomes, notes)
    minutes = round((time.monotonic() - began) / 60, 1)
    if given.again:
        minutes += json.loads(RESULTS.read_text(encoding="utf-8"))["minutes"]
    print(f"{words}\n{minutes} minutes on {given.jobs} processes.")
    out = given.out or (None if given.only or given.tests else RESULTS)
    if out:
        write_results(out, outcomes, mutants, notes, minutes, given.jobs)
    return int(not enough)


def write_results(
    path: Path, outcomes: Sequence[Outcome], mutants: Sequence[Mutant], notes: Notes, minutes: float, jobs: int
) -> None:
    """Write what came out, with all that is needed to do it again.

    Args:
        path: the file.
        outcomes: of the mutants that were tried, in the order of the sample.
        mutants: all that there are.
        notes: which were left out.
        minutes: that it took.
        jobs: on how many processes.
    """
    counts = Counter(outcome.result for outcome in outcomes)
    operators: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        operators[outcome.mutant.split(": ")[1]][outcome.result] += 1
    content = {
        "seed": SEED,
        "sources": source_hashes(),
        "all": len(mutants),
        "tried": len(outcomes),
        "results": dict(counts),
        "operators": {name: dict(found) for name, found in sorted(operators.items())},
        "equivalent": len(notes.equivalent),
        "minutes": minutes,
        "processes": jobs,
        "mutants": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
