"""What a person has set of a deployment in Prefect stays, when a later start registers the deployment again.

Prefect replaces a deployment that is registered again, with its pause and its schedule. So what it holds after each
registration is written down: what it holds otherwise at the next start, a person has set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound

from flows.service.schedule import NIGHTLY_CRON
from heterps_core.json_file import replace_json

_PARAMETER = "parameter "
_SCHEDULE_FIELDS = ("cron", "interval", "rrule", "timezone")
_CONCURRENCY = ("concurrency_limit", "concurrency_options")
_UNSEEN = object()


def register(deployments: Sequence[RunnerDeployment], *, record: Path) -> None:
    """Register deployments, each with what a person has set of it: pause, schedules, tags, concurrency, parameters.

    All other settings come from the code and the environment, as do those of a deployment that was deleted.

    Args:
        deployments: Changed in place, so that they may be registered again.
        record: The file with what Prefect held after the last start, and who set it; read and written.
    """
    before: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        before = json.loads(record.read_text())
    after = {}
    with get_client(sync_client=True) as client:
        for deployment in deployments:
            name = f"{deployment.flow_name}/{deployment.name}"
            found = _held(client, name)
            kept = _set_by_person(found, before.get(name)) if found else []
            for setting in kept:
                _keep(deployment, setting, found)
            deployment.apply()
            after[name] = {"held": _held(client, name), "kept": kept}
    replace_json(record, after)


def _held(client: SyncPrefectClient, name: str) -> dict[str, Any]:
    """Return what the server holds of a deployment, by setting; nothing of one that it does not know."""
    try:
        document = client.read_deployment_by_name(name).model_dump(mode="json")
    except ObjectNotFound:
        return {}
    limit = document["global_concurrency_limit"]
    schedules = [
        {field: each["schedule"].get(field) for field in _SCHEDULE_FIELDS}
        | {"active": each["active"], "parameters": each["parameters"]}
        for each in document["schedules"]
    ]
    return {
        "paused": document["paused"],
        "schedules": sorted(schedules, key=str),
        "tags": sorted(document["tags"]),
        "concurrency": [limit and limit["limit"], document["concurrency_options"]],
        **{f"{_PARAMETER}{name}": value for name, value in document["parameters"].items()},
    }


def _set_by_person(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    """Return the settings that a person has set, at any time since the deployment was made."""
    if before is None:
        # Of an earlier version of this project, which wrote nothing down: what was stopped must stay so.
        of_code = all(each["active"] and each["cron"] in (None, NIGHTLY_CRON) for each in found["schedules"])
        return [*(["paused"] if found["paused"] else []), *([] if of_code else ["schedules"])]
    held = before["held"]
    changed = {name for name in {*held, *found} if held.get(name, _UNSEEN) != found.get(name, _UNSEEN)}
    return sorted(changed | set(before["kept"]))


def _keep(deployment: RunnerDeployment, setting: str, found: Mapping[str, Any]) -> None:
    """Let a registration leave a setting as the server holds it."""
    if setting.startswith(_PARAMETER):
        parameters = {**(deployment.parameters or {}), setting.removeprefix(_PARAMETER): found.get(setting)}
        if setting not in found:
            del parameters[setting.removeprefix(_PARAMETER)]
        deployment.parameters = parameters
        return
    if setting == "schedules":
        deployment.schedules = None
    # Prefect sends what was set of the object, and nothing else.
    fields = _CONCURRENCY if setting == "concurrency" else (setting,)
    deployment.model_fields_set.difference_update(fields)
