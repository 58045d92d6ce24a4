# SPDX-License-Identifier: Apache-2.0
"""What mutation testing changes: every small change of the targets, in the order in which a sample takes them.

benchmarks/mutants.py tries them. The order follows from the sources alone: mutants are ranked by a hash of what they
change, so that a change of the sources elsewhere leaves the others where they were.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src") / "fedquit"
TARGETS = (  # below src/fedquit
    "methods/*.py",
    "distill/losses.py",
    "distill/unlearning.py",
    "distill/virtual_teacher.py",
    "core/fedavg.py",
    "core/params.py",
    "data/samples.py",
    "data/federated.py",
    "running/lifecycle.py",
    "running/simulation.py",
)
NOTES = ROOT / "benchmarks" / "mutants.toml"
SEED = "fedquit mutants 1"
DECLARATIONS = ("__all__", "knobs")  # what is listed, and compared with a page; nothing is computed with it
AROUND = 60  # characters of a statement that a name shows on either side of the change


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: below src/fedquit.
        where: the function or class around it.
        operator: the kind of change.
        old: the statement, or the part of it around the change, on one line.
        new: the same after the change.
        number: counts those that are alike in all of these.
        line: of the file.
        start: where the replaced bytes begin.
        end: where they end.
        text: what takes their place.
    """

    file: str
    where: str
    operator: str
    old: str
    new: str
    number: int
    line: int
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """What identifies it, wherever in its function it stands."""
        count = f" #{self.number}" if self.number else ""
        return f"{self.file} {self.where}: {self.operator}: {self.old} -> {self.new}{count}"

    @property
    def rank(self) -> str:
        """Its place in the order of the sample."""
        return hashlib.blake2b(f"{SEED} {self.name}".encode(), digest_size=16).hexdigest()

    def applied(self, source: bytes) -> bytes:
        """The file with the change in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]


ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "/"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "&"),
}
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # whose mutant is the negation
CONNECTIVES = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


class Finder(ast.NodeVisitor):
    """Finds every change of a file.

    It leaves alone what no behaviour depends on: annotations, decorators, docstrings, the words of errors,
    declarations, imports and what is for type checkers only.
    """

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.scope: list[str] = []
        self.shown = (0, 0)  # where the statement at hand begins and ends; of one with a body, its head
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.mutants: list[Mutant] = []

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        outer = self.shown
        begin, end = self.span(node)
        body = getattr(node, "body", None)
        self.shown = (begin, self.span(body[0])[0] if body else end)
        super().visit(node)
        self.shown = outer

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where the bytes of a node begin and end."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def add(self, operator: str, node: ast.expr | ast.stmt, new: str, at: tuple[int, int] | None = None) -> None:
        """Note a change: the bytes at `at`, or else those of the node, become `new`."""
        start, end = at or self.span(node)
        first, last = self.shown
        before = _one_line(self.text(first, start))
        after = _one_line(self.text(end, last))
        left = before if len(before) <= AROUND else "…" + before[-AROUND:]
        right = after if len(after) <= AROUND else after[:AROUND] + "…"
        old = f"{left}{_one_line(self.text(start, end))}{right}".strip()
        changed = f"{left}{_one_line(new)}{right}".strip()
        where = ".".join(self.scope) or "module"
        key = (where, operator, old, changed)
        self.mutants.append(
            Mutant(self.file, where, operator, old, changed, self.counts[key], node.lineno, start, end, new)
        )
        self.counts[key] += 1

    def swap_between(
        self, operator: str, node: ast.expr | ast.stmt, left: ast.expr, right: ast.expr, words: Sequence[str]
    ) -> None:
        """Exchange the operator that stands between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = self.text(start, end)
        pattern = r"\s+".join(map(re.escape, words[0].split()))
        new = re.sub(pattern, words[1], between, count=1)
        if new != between:
            self.add(operator, node, new, (start, end))

    # What is left alone.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Positions inside of f-strings are wrong before Python 3.12."""

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    # What is changed.

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope.append(node.name)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.default(default)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    def default(self, node: ast.expr) -> None:
        """Change a default: of an argument, or of a field."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.add("default", node, '""' if node.value else '"mutated"')
        else:
            self.visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.default(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id in DECLARATIONS for target in node.targets):
            return
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add("delete statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("delete statement", node, "pass")
        words = ARITHMETIC.get(type(node.op))
        if words:
            self.swap_between("arithmetic", node, node.target, node.value, words)
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        self.add("delete statement", node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add("delete statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("delete statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add("delete statement", node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("delete statement", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add("return None", node, "None", self.span(node.value))
        self.visit(node.value)

    def negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return  # without its `not` it is a mutant already
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], OPPOSITES):
            return  # with the opposite operator it is one already
        start, end = self.span(test)
        self.add("negate condition", test, f"(not ({self.text(start, end)}))")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self.text(*self.span(node.test)):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = ARITHMETIC.get(type(node.op))
        if words:
            self.swap_between("arithmetic", node, node.left, node.right, words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            operator = "boolean" if isinstance(node.op, ast.Not) else "arithmetic"
            self.add(operator, node, self.text(*self.span(node.operand)))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands[:-1], operands[1:], strict=True):
            self.swap_between("comparison", node, left, right, COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values[:-1], node.values[1:], strict=True):
            self.swap_between("boolean", node, left, right, CONNECTIVES[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            for change in (1, -1):
                value = repr(node.value + change)
                self.add("constant", node, f"({value})" if value.startswith("-") else value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            self.visit(node.args[0])  # another type there is an error of Python, not of ours
            return
        for i, keyword in enumerate(node.keywords):
            if keyword.arg == "strict":
                continue  # zip's own check: what is zipped here is of one length
            if keyword.arg:
                kept = [*node.keywords[:i], *node.keywords[i + 1 :]]
                self.add("drop keyword", node, ast.unparse(ast.Call(node.func, node.args, kept)))
            self.visit(keyword.value)
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            first, second, *rest = node.args
            if ast.dump(first) != ast.dump(second):
                swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
                self.add("swap arguments", node, ast.unparse(swapped))
        for part in (node.func, *node.args):
            self.visit(part)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Every change of one file, in the order of its lines.

    Args:
        file: its name below src/fedquit.
        source: what it holds.
    """
    finder = Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.mutants


def target_files(tree: Path = ROOT) -> list[str]:
    """The files whose code is changed, below src/fedquit."""
    found = {path for pattern in TARGETS for path in (tree / PACKAGE).glob(pattern)}
    return sorted(str(path.relative_to(tree / PACKAGE)) for path in found if path.name != "__init__.py")


def all_mutants(tree: Path = ROOT) -> list[Mutant]:
    """Every mutant of every target, in the order of the sample."""
    found = [m for file in target_files(tree) for m in mutants_of(file, (tree / PACKAGE / file).read_bytes())]
    return sorted(found, key=lambda mutant: mutant.rank)


# ---- what is known about some


@dataclass(frozen=True)
class Note:
    """What mutants.toml says about one mutant."""

    mutant: str
    why: str


@dataclass(frozen=True)
class Notes:
    """Which mutants change nothing that a test could see, and why others survive."""

    equivalent: tuple[Note, ...] = ()
    survivor: tuple[Note, ...] = ()

    @classmethod
    def read(cls, path: Path = NOTES) -> Notes:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        kinds = {kind: tuple(Note(**entry) for entry in content.get(kind, ())) for kind in ("equivalent", "survivor")}
        return cls(**kinds)


def sampled(mutants: Sequence[Mutant], notes: Notes, count: int) -> list[Mutant]:
    """The first mutants in the order of the sample, without those that are equivalent.

    Args:
        mutants: all of them, in that order.
        notes: which are equivalent.
        count: how many to take.
    """
    left_out = {note.mutant for note in notes.equivalent}
    return [mutant for mutant in mutants if mutant.name not in left_out][:count]
