"""Every module of the product is reached from a command, a deployment, or a process that one of them starts.

A name counts where it is imported, or stands alone in a string: registries and processes name modules so.
"""

import ast
import re
import tomllib

from tests.paths import PROJECT

ROOMS = ("heterps_core", "infra", "tasks", "flows")
MODULE = rf"(?:{'|'.join(ROOMS)})(?:\.\w+)+"


def entry_points():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    yield from (name.partition(":")[0] for name in project["scripts"].values())
    yield from project["entry-points"]["prefect.plugins"].values()
    deployed = re.findall(r"entrypoint: (\S+)\.py", (PROJECT / "prefect.yaml").read_text())
    yield from (path.replace("/", ".") for path in deployed)
    for path in (
        PROJECT / "Makefile",
        *(PROJECT / "infra" / "service").rglob("*.*"),
        *PROJECT.glob("infra/*/*.sh"),
    ):
        yield from re.findall(rf"-m[ ,]+({MODULE})", path.read_text())


def names_in(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(rf"{MODULE}(:\w+)?", str(node.value)):
            yield node.value.partition(":")[0]


def test_every_module_is_reached_from_an_entry_point():
    paths = [path.relative_to(PROJECT) for room in ROOMS for path in (PROJECT / room).rglob("*.py")]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    reached, names = set(), set(entry_points())
    while names:
        name = names.pop()
        names |= {name.rpartition(".")[0]} - reached - {""}
        names |= modules.keys() & {f"{name}.__main__"} - reached
        if name in modules and name not in reached:
            reached.add(name)
            names.update(names_in(PROJECT / modules[name]))

    assert not modules.keys() - reached
