# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks of this folder and write what their cells print into them.

python examples/notebooks/record.py NOTEBOOK.ipynb …
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any


def carried_out(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints, with the value of its last line, as a notebook shows it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(tree, "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                if value is not None:
                    print(repr(value))
        printed.append(shown.getvalue())
    return printed


def recorded(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """The notebook with these outputs."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, printed, strict=True), start=1):
        output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [output] if text else []
        cell["execution_count"] = number
    return notebook


def main() -> None:
    """Record the notebooks that are named."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in sys.argv[1:]:
        path = Path(name)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        printed = carried_out(notebook)
        text = json.dumps(recorded(notebook, printed), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path}: {len(printed)} cells")


if __name__ == "__main__":
    main()
