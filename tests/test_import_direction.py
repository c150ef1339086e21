"""Imports point one way: flows -> tasks -> infra -> heterps_core, and in the core up its folders; no circles.

The direction is read from every import statement, also those inside functions; that light modules stay light is
tried in a fresh interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import PROJECT

ROOMS = ("heterps_core", "infra", "tasks", "flows")

FORBIDDEN = {
    "heterps_core": {"prefect", "mlflow", "boto3", "botocore", "infra", "tasks", "flows"},
    "infra": {"prefect", "mlflow", "torch", "tasks", "flows", "optuna"},
    "tasks": {"flows", "boto3", "botocore", "optuna"},
    "flows": {"boto3", "botocore", "mlflow", "optuna", "torch"},
}
CORE_FOLDERS = (
    "judging",
    "data",
    "transport",
    "embeddings",
    "models",
    "plans",
    "training",
    "profiling",
    "planning",
    "serving",
)
"""Each imports only from those before it, and from the modules of the core itself."""

ONLY_IMPORTERS = {
    "optuna": {
        "heterps_core/planning/search/schedulers/bayesian.py",
        "heterps_core/training/tuning/search.py",
    },
    "mlflow": {
        "tasks/click_model.py",
        "tasks/records/mlflow_store.py",
        "tasks/records/model_registry.py",
        "tasks/records/mlflow_names.py",
        "tasks/records/run_record.py",
    },
    "boto3": {"infra/providers/aws/errors.py", "infra/providers/aws/prices.py"},
}
LIGHT = [
    "heterps_core",
    "heterps_core.errors",
    "heterps_core.units",
    "heterps_core.hardware",
    "heterps_core.cluster",
    "heterps_core.models.model_graph",
    "heterps_core.plans.scheduling_plan",
    "heterps_core.plans.provisioning_plan",
    "heterps_core.data.dataset",
    "heterps_core.data.preparation",
    "heterps_core.profiling.layer_profile",
    "heterps_core.planning.problem.scheduling_problem",
    "heterps_core.planning.cost_model.evaluation",
    "heterps_core.planning.simulate.dry_run",
    "flows.cli",
    "flows.parameter_checks",
]


def module_files() -> dict[str, Path]:
    files = {}
    for room in ROOMS:
        for path in sorted((PROJECT / room).rglob("*.py")):
            parts = path.relative_to(PROJECT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()


@cache
def names_imported_by(path: Path) -> list[str]:
    """Return what a file imports anywhere in it."""
    return list(imported_names(ast.parse(path.read_text())))


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


def test_modules_import_only_from_rooms_below_theirs():
    wrong = {
        module: names
        for module, path in FILES.items()
        if (
            names := {name.partition(".")[0] for name in names_imported_by(path)}
            & FORBIDDEN[module.partition(".")[0]]
        )
    }

    assert wrong == {}


def core_folder(module: str) -> str | None:
    """Return the folder of the core in which a module lies; None for the core's own modules."""
    path = FILES[module].relative_to(PROJECT / "heterps_core")
    return path.parts[0] if len(path.parts) > 1 else None


def test_folders_of_the_core_import_only_from_those_before_them():
    wrong = set()
    for module, path in FILES.items():
        if not module.startswith("heterps_core."):
            continue
        own = core_folder(module)
        for name in names_imported_by(path):
            imported = next((each for each in (name, name.rpartition(".")[0]) if each in FILES), None)
            if imported is None or not imported.startswith("heterps_core."):
                continue
            other = core_folder(imported)
            if other in (None, own):
                continue
            if own is None or CORE_FOLDERS.index(other) > CORE_FOLDERS.index(own):
                wrong.add(f"{module} -> {imported}")

    assert wrong == set()


@pytest.mark.parametrize("package", ONLY_IMPORTERS)
def test_an_outside_package_enters_only_where_it_is_needed(package):
    importers = {
        path.relative_to(PROJECT).as_posix()
        for path in FILES.values()
        if package in {name.partition(".")[0] for name in names_imported_by(path)}
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
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
    )

    assert loaded.stdout.split() == []


def test_the_drawing_of_the_architecture_is_that_of_the_imports():
    from tests.architecture import PAGE, redrawn

    page = PAGE.read_text()

    assert redrawn(page) == page, "draw it again: python -m tests.architecture"
