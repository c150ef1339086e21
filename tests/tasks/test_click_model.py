"""The registered model answers whatever form of rows MLflow's server, or a caller, hands over, or says why not."""

import json

import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from tasks.click_model import ClickModel
from tests.contracts.test_an_earlier_champion import EXPORTED

ROWS = [{"price": 1.5, "site": "x", "banner": "c0"}, {"price": 2.5, "site": "y", "banner": "c5"}]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


@pytest.fixture(scope="module")
def model():
    return ClickModel(EXPORTED)


@pytest.fixture(scope="module")
def expected(model):
    return model.predict(pd.DataFrame(ROWS)).tolist()


@pytest.mark.parametrize(
    "body",
    [
        {"instances": ROWS},
        {"inputs": ROWS},
        {"inputs": COLUMNS},
        {"dataframe_records": ROWS},
        {"dataframe_split": {"columns": [*COLUMNS], "data": [[*row.values()] for row in ROWS]}},
    ],
    ids=lambda body: "-".join(body) + type(body[next(iter(body))]).__name__,
)
@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")
def test_each_form_of_a_request_gives_the_same_probabilities(model, expected, body):
    from mlflow.pyfunc.scoring_server import infer_and_parse_data

    assert model.predict(infer_and_parse_data(json.loads(json.dumps(body)))).tolist() == expected


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")
def test_null_in_a_request_is_a_missing_value_in_each_form(model):
    from mlflow.pyfunc.scoring_server import infer_and_parse_data

    rows = [{"price": None, "site": "x", "banner": None}, {"price": 2.5, "site": None, "banner": "c5"}]
    expected = model.predict(pd.DataFrame(rows)).tolist()
    for body in (
        {"instances": rows},
        {"inputs": rows},
        {"inputs": {name: [row[name] for row in rows] for name in COLUMNS}},
    ):
        assert model.predict(infer_and_parse_data(json.loads(json.dumps(body)))).tolist() == expected


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        np.array(ROWS, dtype=object),
        COLUMNS,
        {name: np.array(values) for name, values in COLUMNS.items()},
        {name: pd.Series(values, index=[7, 3]) for name, values in COLUMNS.items()},
        pd.DataFrame(COLUMNS).astype({"site": "category", "price": "float32"}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_rows_and_columns_may_be_handed_over_as_they_are(model, expected, given):
    assert model.predict(given).tolist() == expected


def test_one_row_may_stand_alone(model, expected):
    assert model.predict(ROWS[0]).tolist() == expected[:1]
    assert model.predict({name: np.array(value) for name, value in ROWS[0].items()}).tolist() == expected[:1]


def test_what_a_row_does_not_name_is_missing(model):
    without_site = model.predict([ROWS[0], {"price": 2.5, "banner": "c5"}])

    assert without_site.tolist() == model.predict([ROWS[0], {**ROWS[1], "site": None}]).tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1.5, "x", "c0"]], "must name their columns, as a DataFrame, .* got list"),
        (np.zeros((2, 3)), "must name their columns, as a DataFrame, .* got ndarray"),
        ([], "must name their columns"),
        (np.array("x"), "must name their columns, .* got ndarray"),
        (
            pd.DataFrame(ROWS, columns=["price", "site", "banner", "site"]),
            "must name each column once, but have 'site' twice",
        ),
        ("x", "must name their columns, .* got str"),
        (None, "must name their columns, .* got NoneType"),
        ({}, "must have the columns price, site, banner"),
        ([{"price": 1.5}], "must have the columns site, banner"),
        ({**COLUMNS, "site": ["x"]}, "must have columns of one length, got 1, 2"),
        (
            {**COLUMNS, "site": [["x"], ["y"]]},
            "column site must hold texts or numbers, got values of type list",
        ),
        ({**COLUMNS, "site": np.array([["x"], ["y"]])}, "column site must hold texts or numbers"),
        ({**COLUMNS, "site": [{"a": 1}, {}]}, "column site must hold texts or numbers"),
        ({**COLUMNS, "site": [Ellipsis, 1]}, "column site must hold texts or numbers"),
        ({**COLUMNS, "price": [[1.5], [2.5]]}, "column price must hold numbers, got values of type list"),
        ({**COLUMNS, "price": ["cheap", 1]}, "column price must hold numbers, got 'cheap'"),
        ({**COLUMNS, "price": [{}, 1]}, "column price must hold texts or numbers, got values of type dict"),
        ({**COLUMNS, "price": [1 + 2j, 1]}, "column price must hold texts or numbers"),
    ],
    ids=str,
)
def test_what_cannot_be_predicted_is_said_in_one_line(model, given, message):
    with pytest.raises(MlflowException, match=message) as error:
        model.predict(given)

    assert "\n" not in str(error.value)
