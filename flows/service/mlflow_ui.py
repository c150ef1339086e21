"""The process of the MLflow UI: makes the store whole, then becomes MLflow's server."""

from __future__ import annotations

import os
import sys

from infra.workspace import Workspace
from tasks.records.mlflow_store import make_store


def main() -> None:
    """Serve with the arguments of `mlflow server`; does not return."""
    make_store(Workspace.locate())
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", *sys.argv[1:]])


if __name__ == "__main__":
    main()
