"""Start-up plugin of Prefect that lets `prefect deployment run train-ctr` mean `train-ctr/train-ctr`.

Prefect loads it through its entry point group `prefect.plugins` whenever it is imported. It acts in the `prefect`
command: a bare deployment name is completed, and without a chosen server the one that `heterps serve` started is
used, with its password. And it acts in the process of a flow run, which would end at once where its server has died
and is being started again: there it waits for the server.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath

from prefect.plugins import HookContext, SetupResult, register_hook

from flows.service.prefect_connection import chosen_server, wait_for_server
from flows.service.schedule import DEPLOYMENTS
from heterps_core.errors import ConfigurationError
from infra.workspace import HOME_VARIABLE, SERVICE_TIMEOUT_S, Workspace, answers

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Prefect's own: the run that a process was started for."""

_OPTIONS_WITHOUT_VALUE = ("--watch", "--prompt", "--no-prompt", "--help", "-h")


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Complete the name on the command line and point the command at the served Prefect; see above."""
    if os.environ.get(FLOW_RUN_VARIABLE) and (api_url := os.environ.get("PREFECT_API_URL")):
        wait_for_server(api_url)
        return None
    if not _is_prefect_command(sys.argv, sys.orig_argv):
        return None
    typed, sys.argv[1:] = sys.argv[1:], _with_full_deployment_name(sys.argv[1:])
    try:
        server = chosen_server(Workspace.locate())
    except ConfigurationError as error:
        if typed == sys.argv[1:]:
            raise
        # Prefect would go on with a server of its own.
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    if server is None or not answers(f"{server.api_url}/health", timeout_s=SERVICE_TIMEOUT_S):
        if ctx.api_url or typed == sys.argv[1:]:
            return None
        # Prefect would start a server of its own, which knows no deployment, and end in a traceback.
        print(
            f"error: {Workspace.locate().root} must be served, but is not; start heterps serve there, or set "
            f"{HOME_VARIABLE} to the workspace that is",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return SetupResult(env=server.client_environment())


def _is_prefect_command(argv: Sequence[str], original_argv: Sequence[str]) -> bool:
    """Tell whether this process is the `prefect` console script or `python -m prefect`.

    Args:
        argv: `sys.argv`; its first item is "-m" while `python -m` still imports the package.
    """
    if argv[0] == "-m":
        return "prefect" in original_argv[: len(original_argv) - len(argv) + 1]
    program = PurePath(argv[0])
    return program.stem == "prefect" or program.parts[-2:] == ("prefect", "__main__.py")


def _with_full_deployment_name(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the bare name `x` of a deployment of ours written as `x/x`.

    Only for `deployment run` and `deployment inspect`; everything else is returned as it is.

    Example:
        >>> _with_full_deployment_name(["deployment", "run", "train-ctr", "--watch"])
        ['deployment', 'run', 'train-ctr/train-ctr', '--watch']
    """
    completed = list(arguments)
    asked = re.search(r"(?:^| )deployments? (?:run|inspect)(?= |$)", " ".join(arguments))
    for position, argument in enumerate(arguments):
        before = arguments[position - 1]
        is_value = before.startswith("-") and "=" not in before and before not in _OPTIONS_WITHOUT_VALUE
        if asked and argument in DEPLOYMENTS and not is_value:
            completed[position] = f"{argument}/{argument}"
    return completed
