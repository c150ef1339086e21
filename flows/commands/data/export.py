"""Write the champion's network, with its tables, as a program of torch.export for servers that have torch alone:
network.pt2, model.json with columns and table rows, and examples.json to check another reader of raw values by.

examples:
  heterps export served
  heterps export served --version 12

exit status: 0 when the files are written; 2 where the model cannot be exported, or there is no champion yet; 6 where
its files were changed or damaged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from infra.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; its files are replaced")
    parser.add_argument(
        "--version", metavar="N", help="of the registered model (default: that of the champion)"
    )


def run(options: argparse.Namespace) -> None:
    """Export, and print the version and the folder."""
    from heterps_core.serving.network_export import export_network
    from tasks.records import model_registry

    workspace = Workspace.locate()
    version = model_registry.version_to_serve(workspace, options.version)
    export_network(model_registry.verified_folder(workspace, version), options.folder)
    print(f"version {version.version} ({version.model}): {options.folder}")
