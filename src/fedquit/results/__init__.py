# SPDX-License-Identifier: Apache-2.0
"""The results of runs and comparisons: their schema, their folders, and every quantity that is derived from them.

Terminal, HTML, CSV, Markdown, LaTeX and JSON are views of this package: none of them computes a number itself. It needs
neither torch nor matplotlib.

| module | holds |
|---|---|
| `schema` | the fields of `results.json` and the table of measures |
| `folders` | reading and writing of the folders of runs and comparisons |
| `requests` | the rows of one request, by phase |
| `quantities` | one function for each derived quantity of one or several requests |
| `gaps`, `tug_of_war`, `intervals` | the formulas behind them, as functions of numbers |
| `averages` | means of rows, curves, ROC curves and densities |
| `summary` | one method over all its requests: a line of a table |
| `comparison` | several methods over the same requests: the whole table |
| `verdicts` | whether a method differs from Retrain and from Natural, by the tests of `fedquit.inference` |
| `words` | how a number is printed |
"""

from fedquit.results.comparison import Comparison
from fedquit.results.folders import ResultSet, RunResults, load_results, open_folders, read_comparison, read_run
from fedquit.results.requests import RequestRows
from fedquit.results.schema import MEASURES, SCHEMA, Measure
from fedquit.results.summary import MethodSummary, summarise

__all__ = [
    "MEASURES",
    "SCHEMA",
    "Comparison",
    "Measure",
    "MethodSummary",
    "RequestRows",
    "ResultSet",
    "RunResults",
    "load_results",
    "open_folders",
    "read_comparison",
    "read_run",
    "summarise",
]
