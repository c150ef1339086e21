"""Draws how the rooms of the product import one another, for docs/ARCHITECTURE.md: python -m tests.architecture"""

from tests.paths import PROJECT
from tests.test_import_direction import CORE_FOLDERS, FILES, core_folder, names_imported_by

PAGE = PROJECT / "docs" / "ARCHITECTURE.md"
ORDER = (*CORE_FOLDERS, "infra", "tasks", "flows")


def room_of(module: str) -> str | None:
    """Return the part of the drawing in which a module lies; None for the core's own modules."""
    room = module.partition(".")[0]
    return core_folder(module) if room == "heterps_core" else room


def reachable(edges: dict[str, set[str]], start: str, *, without: str) -> set[str]:
    """Return what is reached from a room by way of others than a direct arrow to `without`."""
    found: set[str] = set()
    waiting = edges[start] - {without}
    while waiting:
        room = waiting.pop()
        found.add(room)
        waiting |= edges[room] - found
    return found


def drawing() -> str:
    """Return the rooms in Mermaid, an arrow from each to those that it imports and reaches in no other way."""
    edges: dict[str, set[str]] = {room: set() for room in ORDER}
    for module, path in FILES.items():
        own = room_of(module)
        for name in names_imported_by(path) if own else ():
            imported = next((each for each in (name, name.rpartition(".")[0]) if each in FILES), None)
            other = room_of(imported) if imported else None
            if own and other and other != own:
                edges[own].add(other)
    lines = [
        f"    {room} --> {other}"
        for room in reversed(ORDER)
        for other in sorted(edges[room], key=ORDER.index, reverse=True)
        if other not in reachable(edges, room, without=other)
    ]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def redrawn(page: str) -> str:
    """Return the page with the drawing of today."""
    before, _, rest = page.partition("```mermaid")
    return before + drawing() + rest.partition("```")[2]


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text()))
