"""Imports point one way: flows -> tasks -> infra -> heterps_core; and no module is part of a circle.

The direction is read from every import statement, also those inside functions; that light modules stay light is
tried in a fresh interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("heterps_core", "infra", "tasks", "flows")

FORBIDDEN = {
    "heterps_core": {"prefect", "mlflow", "boto3", "botocore", "infra", "tasks", "flows"},
    "infra": {"prefect", "mlflow", "torch", "tasks", "flows", "optuna"},
    "tasks": {"flows", "boto3", "botocore", "optuna"},
    "flows": {"boto3", "botocore", "mlflow", "optuna", "torch"},
}
ONLY_IMPORTERS = {
    "optuna": {"heterps_core/scheduling/schedulers/bayesian.py"},
    "mlflow": {
        "tasks/mlflow_store.py",
        "tasks/model_registry.py",
        "tasks/past_runs.py",
        "tasks/patient_client.py",
        "tasks/tracking.py",
    },
    "boto3": {"infra/catalogue/aws_prices.py", "infra/providers/aws/provider.py"},
}
LIGHT = [
    "heterps_core",
    "heterps_core.errors",
    "heterps_core.units",
    "heterps_core.hardware",
    "heterps_core.cluster",
    "heterps_core.graph.model_graph",
    "heterps_core.plans.scheduling_plan",
    "heterps_core.plans.provisioning_plan",
    "heterps_core.data.dataset",
    "heterps_core.data.preparation",
    "heterps_core.profiling.layer_profile",
    "heterps_core.problem.scheduling_problem",
    "heterps_core.cost_model.evaluation",
    "heterps_core.simulation.rehearsed_workers",
    "heterps_core.cli",
]


def module_files() -> dict[str, Path]:
    files = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level_imports(path: Path) -> set[str]:
    """Return the project's modules that are imported when `path` is."""
    tree = ast.parse(path.read_text())
    statements = [
        statement
        for statement in tree.body
        if not (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test))
    ]
    found = set()
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        for name in imported_names(statement):
            for candidate in (name, name.rpartition(".")[0]):
                if candidate in FILES:
                    found.add(candidate)
                    break
    return found


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_from_rooms_below_it(module):
    room = module.partition(".")[0]
    names = {name.partition(".")[0] for name in imported_names(ast.parse(FILES[module].read_text()))}

    assert not names & FORBIDDEN[room]


@pytest.mark.parametrize("package", ONLY_IMPORTERS)
def test_an_outside_package_enters_only_where_it_is_needed(package):
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in FILES.values()
        if package in {name.partition(".")[0] for name in imported_names(ast.parse(path.read_text()))}
    }

    assert importers == ONLY_IMPORTERS[package]


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: module_level_imports(path) - {module} for module, path in FILES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join([*trail[trail.index(module) :], module])}"
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_light_modules_load_neither_torch_nor_the_outside_world():
    heavy = {"torch", "prefect", "mlflow", "boto3", "optuna", "sklearn", "pandas", "matplotlib"}
    for module in LIGHT:
        assert module in FILES, module
    program = f"import sys, importlib; [importlib.import_module(m) for m in {LIGHT!r}]; " + (
        f"print(*sorted({heavy!r} & set(sys.modules)))"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert loaded.stdout.split() == []
