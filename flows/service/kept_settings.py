"""What a person has set of a deployment in Prefect stays, when a later start registers the deployment again.

Prefect replaces a deployment that is registered again, with its pause and its schedule. So what it holds after each
registration is written down: what it holds otherwise at the next start, a person has set.
"""

from __future__ import annotations

import json
import logging
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

logger = logging.getLogger(__name__)


def register(deployments: Sequence[RunnerDeployment], *, record: Path) -> None:
    """Register deployments, each with what a person has set of it: pause, schedules, tags, concurrency, parameters.

    All other settings come from the code and the environment, as do those of a deployment that was deleted.

    Args:
        deployments: Changed in place, so that they may be registered again.
        record: The file with what Prefect held after the last start, and who set it; read and written.
    """
    notes = _read_notes(record)
    with get_client(sync_client=True) as client:
        for deployment in deployments:
            name = f"{deployment.flow_name}/{deployment.name}"
            found = _held(client, name)
            kept = _set_by_person(found, notes.get(name)) if found else []
            for setting in kept:
                _keep(deployment, setting, found)
            # A process that is killed during the registration leaves both possible states in the note.
            sent = _settings(deployment.model_dump(mode="json"))
            replace_json(record, notes | {name: {"held": found, "sent": sent, "kept": kept}})
            deployment.apply()
            notes[name] = {"held": _held(client, name), "sent": {}, "kept": kept}
            replace_json(record, notes)


def _read_notes(record: Path) -> dict[str, dict[str, Any]]:
    """Return the notes of the last start; none where the file is missing, damaged or of another form."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return {
            name: {"held": dict(note["held"]), "sent": dict(note.get("sent", {})), "kept": list(note["kept"])}
            for name, note in json.loads(record.read_text()).items()
        }
    return {}


def _held(client: SyncPrefectClient, name: str) -> dict[str, Any]:
    """Return the settings of a deployment in the server; none where the server does not know it."""
    try:
        return _settings(client.read_deployment_by_name(name).model_dump(mode="json"))
    except ObjectNotFound:
        return {}


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a deployment, as the server holds it or as it is sent."""
    limit = document.get("global_concurrency_limit") or {"limit": document.get("concurrency_limit")}
    schedules = [
        {field: each["schedule"].get(field) for field in _SCHEDULE_FIELDS}
        | {"active": each["active"] is not False, "parameters": each["parameters"]}
        for each in document["schedules"] or ()
    ]
    return {
        "paused": bool(document["paused"]),
        "schedules": sorted(schedules, key=str),
        "tags": sorted(document["tags"] or ()),
        "concurrency": [limit["limit"], document["concurrency_options"]],
        **{f"{_PARAMETER}{name}": value for name, value in (document["parameters"] or {}).items()},
    }


def _set_by_person(found: Mapping[str, Any], note: Mapping[str, Any] | None) -> list[str]:
    """Return the settings that a person has set, at any time since the deployment was made."""
    if note is None:
        # An earlier version wrote no notes: pauses and schedules that a person stopped must stay so.
        of_code = all(each["active"] and each["cron"] in (None, NIGHTLY_CRON) for each in found["schedules"])
        return [*(["paused"] if found["paused"] else []), *([] if of_code else ["schedules"])]
    states = [note[state] for state in ("held", "sent") if note[state]]
    changed = {
        name
        for name in set().union(found, *states)
        if found.get(name, _UNSEEN) not in [state.get(name, _UNSEEN) for state in states]
    }
    return sorted(changed | set(note["kept"]))


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
