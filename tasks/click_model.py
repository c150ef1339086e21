"""The exported model as MLflow loads and asks it: a table of raw columns in, click probabilities out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError
from heterps_core.serving.raw_columns import SOURCE, Columns

if TYPE_CHECKING:
    import pandas as pd

    from heterps_core.serving.exported_model import ClickPredictor


class ClickModel:
    """A pyfunc of MLflow around the core's predictor."""

    def __init__(self, folder: Path) -> None:
        from heterps_core.serving.exported_model import ClickPredictor

        self._predictor: ClickPredictor = ClickPredictor(folder)

    @property
    def schema(self) -> DataSchema:
        """Which columns the model takes."""
        return self._predictor.schema

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> npt.NDArray[np.float64]:
        """Return click probabilities [N] of N rows of raw columns, [N, labels] of a model of several labels.

        Args:
            model_input: The numeric columns and the slots of the schema, under their names, in any order and of any
                type; others are ignored. A DataFrame, {column: values}, [{column: value}] or one {column: value}, as
                MLflow's server makes them of all forms of its JSON. Ids of more than 15 digits should be texts, as
                MLflow makes whole numbers with missing ones among them floating, which is refused from 2^53 on.

        Raises:
            MlflowException: A column is missing, or a numeric one holds what is no number; MLflow's server answers
                with its line and no stack trace.
        """
        try:
            return self._predictor.predict(_columns(model_input, self.schema))
        except DataError as error:
            from mlflow.exceptions import MlflowException

            raise MlflowException.invalid_parameter_value(str(error)) from error


def _columns(given: Any, schema: DataSchema) -> Columns:
    """Return the columns of any of the forms that `ClickModel.predict` takes."""
    import pandas as pd

    columns: dict[str, Any]
    if isinstance(given, pd.DataFrame):
        doubled = {str(name) for name in given.columns[given.columns.duplicated()]}
        if twice := sorted(doubled.intersection((*schema.numeric_columns, *schema.text_columns))):
            raise DataError(SOURCE, f"must name each column once, but have {twice[0]!r} twice")
        columns = {str(name): column for name, column in given.items()}
        return columns
    if isinstance(given, Mapping):
        is_row = any(_is_plain(value) for name, value in given.items() if name not in schema.list_columns)
        return {str(name): _unwrapped_column([value] if is_row else value) for name, value in given.items()}
    is_list = isinstance(given, list) or getattr(given, "ndim", 0) == 1
    if is_list and len(given) and all(isinstance(row, Mapping) for row in given):
        names = dict.fromkeys(name for row in given for name in row)
        return {str(name): [_unwrapped(row.get(name)) for row in given] for name in names}
    raise DataError(
        SOURCE,
        f"must name their columns, as a DataFrame, {{column: values}} or [{{column: value}}] does, got "
        f"{type(given).__name__}",
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bytes) or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0


def _unwrapped_column(values: Any) -> Any:
    """Return a column; of one of objects, as MLflow makes them where a JSON null is among them, each unwrapped."""
    is_of_objects = isinstance(values, list) or getattr(values, "dtype", None) == np.dtype(object)
    return [*map(_unwrapped, values)] if is_of_objects else values


def _unwrapped(value: Any) -> Any:
    """Return the value of an array of no dimension, as MLflow makes them of JSON; all else as it is."""
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def example_rows(schema: DataSchema) -> pd.DataFrame:
    """Return two rows of raw columns, one with values and one with none, as an example for people."""
    import pandas as pd

    columns: dict[str, Any] = {name: [1.0, float("nan")] for name in schema.numeric_columns}
    texts = dict.fromkeys((*schema.text_columns, *schema.pointer_columns[:1]))
    columns |= {name: pd.Series(["a1b2c3d4", None], dtype=object) for name in texts}
    return pd.DataFrame(columns)


def columns_taken(schema: DataSchema) -> list[dict[str, str]]:
    """Return the columns that a model takes and what each should hold, for people."""
    holds = (
        dict.fromkeys(schema.numeric_columns, "number or missing")
        | dict.fromkeys(schema.text_columns, "text or number, or missing")
        | dict.fromkeys(schema.list_columns, "list of texts, or one text with separators")
        | dict.fromkeys(
            (each.name for each in schema.history_columns), "list of texts, or left out: see the key"
        )
        | dict.fromkeys(schema.pointer_columns[1:], "time before which the history ends; left out: now")
        | dict.fromkeys(schema.pointer_columns[:1], "text or number, or missing: the key of the history")
    )
    return [{"name": name, "holds": kind} for name, kind in holds.items()]


def _load_pyfunc(data_path: str) -> ClickModel:
    """Return the model in `data_path`; MLflow calls this by name."""
    return ClickModel(Path(data_path))
