# SPDX-License-Identifier: Apache-2.0
"""Results as tables of pandas, which is imported only here and only when a table is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedquit.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame  # noqa: PLC0414 - others import its type from here

    from fedquit.results.schema import Row
    from fedquit.results.summary import MethodSummary

PLAIN = (str, int, float, bool)


def frame_of_rows(rows: Iterable[Row]) -> DataFrame:
    """A line for each row of a run, with its plain fields as columns; paths, curves and the like are left out.

    Args:
        rows: of `results.json`.
    """
    return data_frame([_plain_fields(row) for row in rows])


def frame_of_table(table: Iterable[MethodSummary], **about: str) -> DataFrame:
    """A line for each line of a comparison's table.

    The columns are the plain fields of `MethodSummary`, each measure under its own name, its gap to Retrain as
    `…_gap`, the gap's standard deviation as `…_gap_sd`, and its verdict against Retrain as `…_verdict`.

    Args:
        table: of `comparison.json`.
        about: columns that are the same in every line.
    """
    return data_frame([{**about, **_of_line(line)} for line in table])


def data_frame(records: list[dict[str, Any]]) -> DataFrame:
    """A DataFrame of records.

    Raises:
        InputError: if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("to_pandas needs pandas, which is not installed: pip install 'fedquit[pandas]'.") from error
    return pandas.DataFrame.from_records(records)


def _plain_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in row.items() if isinstance(value, PLAIN)}
    if "clients" in row:
        plain["clients"] = ", ".join(map(str, row["clients"]))
    return plain


def _of_line(line: MethodSummary) -> dict[str, Any]:
    record = {key: value for key, value in line.to_dict().items() if isinstance(value, PLAIN)}
    record |= dict(line.means)
    record |= {f"{key}_gap": gap for key, gap in line.gaps.items()}
    record |= {f"{key}_gap_sd": deviation for key, deviation in line.deviations.items()}
    record |= {f"{key}_verdict": verdict.word for key, verdict in line.verdicts.items()}
    return record
