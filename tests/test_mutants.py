# SPDX-License-Identifier: Apache-2.0
"""The mutants of benchmarks/mutants.py: each operator, the order of the sample, and the record of the last run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up, and one imports the other
    spec.loader.exec_module(module)
    return module


mutation = _loaded("mutation")
mutants = _loaded("mutants")
EVERY = mutation.all_mutants()
NAMES = {mutant.name for mutant in EVERY}
NOTES = mutation.Notes.read()


def changes(source: str, operator: str) -> list[str]:
    """The whole texts after each change of one operator."""
    found = mutation.mutants_of("file.py", source.encode())
    return [m.applied(source.encode()).decode() for m in found if m.operator == operator]


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("arithmetic", "x = a + b * c", ["x = a - b * c", "x = a + b / c"]),
        ("arithmetic", "x = (a) ** (b)", ["x = (a) * (b)"]),
        ("arithmetic", "x = -a", ["x = a"]),
        ("arithmetic", "x //= 2", ["x /= 2"]),
        ("arithmetic", "x = a @ b", []),
        ("comparison", "x = 0 < a <= b", ["x = 0 <= a <= b", "x = 0 < a < b"]),
        ("comparison", "x = a is not b", ["x = a is b"]),
        ("comparison", "x = a in b", ["x = a not in b"]),
        ("comparison", "x = a not  in b", ["x = a in b"]),
        ("boolean", "x = a and b and c", ["x = a or b and c", "x = a and b or c"]),
        ("boolean", "x = not a", ["x = a"]),
        ("constant", "x = 5", ["x = 6", "x = 4"]),
        ("constant", "x = 0.5", ["x = 1.5", "x = (-0.5)"]),
        ("constant", "x = True", ["x = False"]),
        ("constant", "x = 'é', 5", ["x = 'é', 6", "x = 'é', 4"]),  # positions are counted in bytes
        ("negate condition", "if a < b: pass", ["if (not (a < b)): pass"]),
        ("negate condition", "if a == b: pass", []),  # a != b is a mutant already
        ("negate condition", "if not a: pass", []),
        ("negate condition", "x = a if b else c", ["x = a if (not (b)) else c"]),
        ("negate condition", "x = [a for a in b if a]", ["x = [a for a in b if (not (a))]"]),
        ("negate condition", "while a: pass", ["while (not (a)): pass"]),
        ("drop keyword", "f(a, b=1, c=2)", ["f(a, c=2)", "f(a, b=1)"]),
        ("drop keyword", "f(a, **b)", []),
        ("constant", "zip(a, b, strict=True)", []),  # a check that nothing here can fail
        ("swap arguments", "f(a, b, c)", ["f(b, a, c)"]),
        ("swap arguments", "f(a, a)", []),
        ("swap arguments", "f(*a, b)", []),
        ("swap arguments", "isinstance(a, b)", []),
        (
            "default",
            "def f(a='x', *, b=''): pass",
            ["def f(a=\"\", *, b=''): pass", "def f(a='x', *, b=\"mutated\"): pass"],
        ),
        ("default", "class A:\n    a: str = 'x'", ['class A:\n    a: str = ""']),
        ("constant", "class A:\n    a: int = 1", ["class A:\n    a: int = 2", "class A:\n    a: int = 0"]),
        ("return None", "def f():\n    return a", ["def f():\n    return None"]),
        ("return None", "def f():\n    return None", []),
        ("return None", "def f():\n    return", []),
        ("delete statement", "f(a)", ["pass"]),
        ("delete statement", "x += a", ["pass"]),
        ("delete statement", "x[0] = a", ["pass"]),
        ("delete statement", "x = a", []),  # whoever reads x would fail
        ("delete statement", "raise A('b')", ["pass"]),
        ("delete statement", "del a", ["pass"]),
        ("delete statement", "for a in b:\n    break", ["for a in b:\n    pass"]),
    ],
)
def test_each_operator_changes_what_it_should(operator: str, source: str, expected: list[str]) -> None:
    assert changes(source, operator) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring with 1."""',
        "from a import b",
        "__all__ = f(1, 2)",
        "knobs = (Knob('lr', 1, 2),)",
        "x: Literal[1]",
        "@f(1, 2)\nclass A(B, c=1): pass",
        "@f(1)\ndef g(a: List[1]) -> List[2]: pass",
        "if TYPE_CHECKING:\n    f(1)",
        "assert a == 1",
        'x = f"{a + 1:06d}"',
    ],
)
def test_what_no_behaviour_depends_on_is_left_alone(source: str) -> None:
    assert mutation.mutants_of("file.py", source.encode()) == []


def test_the_words_of_an_error_are_left_alone_and_its_raising_is_not() -> None:
    source = "def f():\n    raise A(f(a[:3], 1 + 2))"
    assert [m.operator for m in mutation.mutants_of("file.py", source.encode())] == ["delete statement"]


def test_a_name_shows_the_statement_around_the_change_and_is_given_once() -> None:
    source = "class A:\n    def f(self, a):\n        if a + 1 > 2:\n            return g(1, 1)\n"
    names = [m.name for m in mutation.mutants_of("file.py", source.encode())]
    assert "file.py A.f: arithmetic: if a + 1 > 2: -> if a - 1 > 2:" in names
    assert "file.py A.f: constant: if a + 1 > 2: -> if a + 1 > 3:" in names
    assert len(set(names)) == len(names)
    twice = mutation.mutants_of("file.py", b"f(a)\nf(a)\n")
    assert [m.name.rpartition(" ")[2] for m in twice] == ["pass", "#1"]


def test_every_mutant_of_the_targets_has_its_own_name_and_is_python() -> None:
    assert len(NAMES) == len(EVERY) > 2000
    assert {mutant.file.split("/")[0] for mutant in EVERY} == {"methods", "distill", "core", "data", "running"}
    for mutant in EVERY[:100]:
        source = (mutation.ROOT / mutation.PACKAGE / mutant.file).read_bytes()
        changed = mutant.applied(source)
        assert changed != source
        compile(changed, mutant.file, "exec")


def test_the_order_of_the_sample_does_not_depend_on_what_else_there_is() -> None:
    kept = [mutant.name for mutant in EVERY if mutant.file.startswith("core/")]
    alone = sorted(
        (m for f in ("core/fedavg.py", "core/params.py") for m in _mutants_in(f)), key=lambda mutant: mutant.rank
    )
    assert [mutant.name for mutant in alone] == kept
    assert kept != sorted(kept)


def _mutants_in(file: str) -> list[mutation.Mutant]:  # type: ignore[name-defined]
    found = mutation.mutants_of(file, (mutation.ROOT / mutation.PACKAGE / file).read_bytes())
    assert isinstance(found, list)
    return found


def test_equivalent_mutants_are_left_out_of_the_sample_and_others_take_their_place() -> None:
    second = mutation.Note(EVERY[1].name, "it changes nothing")
    chosen = mutation.sampled(EVERY, mutation.Notes(equivalent=(second,)), 3)
    assert chosen == [EVERY[0], EVERY[2], EVERY[3]]


def test_what_is_noted_is_about_mutants_that_exist_with_a_reason_once() -> None:
    noted = [note.mutant for note in (*NOTES.equivalent, *NOTES.survivor)]
    assert [name for name in noted if name not in NAMES] == [], "take them out of benchmarks/mutants.toml"
    assert len(set(noted)) == len(noted)
    assert all(len(note.why) > 30 for note in (*NOTES.equivalent, *NOTES.survivor))


def test_a_mutant_is_in_the_tree_only_while_it_is_tried(tmp_path: Path) -> None:
    mutant = EVERY[0]
    target = tmp_path / mutation.PACKAGE / mutant.file
    target.parent.mkdir(parents=True)
    source = (mutation.ROOT / mutation.PACKAGE / mutant.file).read_bytes()
    target.write_bytes(source)
    os.utime(target, (1_000_000, 1_000_000))
    with mutants.Tree(tmp_path).changed(mutant):
        assert target.read_bytes() == mutant.applied(source)
        assert target.stat().st_mtime > 1_000_000, "or Python would take the compiled original for it"
    assert target.read_bytes() == source
    assert target.stat().st_mtime == 1_000_000


def test_a_fork_returns_what_it_did_and_ends_in_time(tmp_path: Path) -> None:
    assert mutants.in_fork(lambda: {"a": [1, "b"]}, tmp_path, limit=60) == {"a": [1, "b"]}
    assert mutants.in_fork(lambda: 1 / 0, tmp_path, limit=60) is None
    assert "ZeroDivisionError" in (tmp_path / "printed.txt").read_text()
    with pytest.raises(TimeoutError):
        mutants.in_fork(_for_ever, tmp_path, limit=0.2)


def _for_ever() -> None:
    while True:
        pass


def test_the_tests_of_a_mutant_are_those_that_execute_its_line_the_fastest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for name in ("elsewhere", "beside", "slow", "fast"):
        (tmp_path / name).write_text("from fedquit.core.fedavg import fedavg\n")
    (tmp_path / "importing").write_text("from fedquit.core.params import mean\n")
    mutant = next(m for m in EVERY if m.file == "core/params.py")
    elsewhere = mutants.Recorded("elsewhere", 0, "", 0.1, {"core/fedavg.py": [mutant.line]})
    beside = mutants.Recorded("beside", 0, "", 0.2, {"core/params.py": [mutant.line + 1]})
    slow = mutants.Recorded("slow", 0, "", 9.0, {"core/params.py": [mutant.line]})
    fast = mutants.Recorded("fast", 0, "", 1.0, {"core/params.py": [mutant.line, mutant.line + 1]})
    importing = mutants.Recorded("importing", 0, "", 5.0, {})
    records = [elsewhere, beside, slow, fast, importing]
    assert mutants.covering(mutant, records, inside=True) == [fast, slow]
    outside = mutants.covering(mutant, records, inside=False)
    assert outside == [beside, fast, importing, slow], "any function of the file, or its import"


def test_lines_of_functions_are_their_bodies() -> None:
    source = b"a = 1\n@f\ndef g(\n    a=1,\n):\n    return a\nclass B:\n    c: int = 2\n    def d(self): return 3\n"
    assert mutants.lines_of_functions(source) == {6, 9}


def test_the_summary_wants_enough_killed_and_every_survivor_explained() -> None:
    def outcomes(dead: int, alive: int) -> list[mutants.Outcome]:  # type: ignore[name-defined]
        killed = [mutants.Outcome(f"k{i}", 1, "killed" if i else "timeout") for i in range(dead)]
        return killed + [mutants.Outcome(f"s{i}", 1, "survived" if i else "not covered") for i in range(alive)]

    explained = mutation.Notes(survivor=tuple(mutation.Note(f"s{i}", "") for i in range(4)))
    assert mutants.summary(outcomes(97, 3), explained)[1]
    assert not mutants.summary(outcomes(96, 4), explained)[1]
    words, enough = mutants.summary(outcomes(97, 3), mutation.Notes())
    assert not enough
    assert "97 of 100 mutants killed (97.0%)" in words
    assert "3 survivors are not explained" in words
    assert mutants.summary(outcomes(100, 0), mutation.Notes())[1]


def test_again_keeps_what_was_killed_in_files_that_have_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = [m for m in EVERY if m.file in ("core/params.py", "core/fedavg.py")]
    params, other = (next(m for m in sample if m.file == file) for file in ("core/params.py", "core/fedavg.py"))
    alive = next(m for m in sample if m.file == "core/params.py" and m is not params)
    slow = next(m for m in sample if m.file == "core/params.py" and m not in (params, alive))
    results = {params: "killed", other: "killed", alive: "survived", slow: "timeout"}
    entries = [dataclasses.asdict(mutants.Outcome(m.name, m.line, result)) for m, result in results.items()]
    sources = mutants.source_hashes() | {"core/fedavg.py": "another"}
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"sources": sources, "mutants": entries}))
    monkeypatch.setattr(mutants, "RESULTS", record)
    assert list(mutants.killed_before(sample)) == [params.name], "a timeout may have been a busy machine"


RECORDED = pytest.mark.skipif(not mutants.RESULTS.exists(), reason="no whole run of benchmarks/mutants.py is recorded")


@RECORDED
def test_the_record_of_the_last_run_holds_what_the_documents_say() -> None:
    record = json.loads(mutants.RESULTS.read_text())
    outcomes = [mutants.Outcome(**entry) for entry in record["mutants"]]
    assert record["seed"] == mutation.SEED
    assert record["tried"] == len(outcomes) == len({o.mutant for o in outcomes})
    assert sum(record["results"].values()) == len(outcomes)
    explained = {note.mutant for note in NOTES.survivor}
    assert sum(o.dead for o in outcomes) >= mutants.WANTED * len(outcomes)
    assert [o.mutant for o in outcomes if not o.dead and o.mutant in NAMES and o.mutant not in explained] == []
    assert all((ROOT / o.by.partition("::")[0]).is_file() for o in outcomes if o.result == "killed" and o.by)


@RECORDED
def test_the_short_version_finds_enough_mutants_in_the_sources() -> None:
    record = json.loads(mutants.RESULTS.read_text())
    quick = {o["mutant"] for o in record["mutants"] if o["result"] == "killed" and o["seconds"] <= mutants.QUICK}
    assert len(quick & NAMES) >= mutants.SHORT, "run `make mutants` anew"
