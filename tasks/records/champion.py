"""Champion and challenger: who serves, whether a night's model takes its place, and the way back.

The alias `champion` in MLflow's registry names the version that serves; `challenger` the newest. What must be known
later stands as tags on the versions, where other hosts see it too: the whole decision with the champion that it was
made against, and since when a version is champion. An alias moves in one transaction, after the decision was written
and before it is marked as applied. Whatever is killed in between leaves either the old champion, and the decision can
be applied again, or the new one, and the mark is made up for.

All raise ConfigurationError where MLflow's store does not answer, and CheckpointError, with nothing changed, where
the files of a version are not those that were registered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from filelock import FileLock

from heterps_core.errors import CheckpointError, ConfigurationError, UnknownNameError
from infra.workspace import Workspace
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records import model_registry
from tasks.records.mlflow_names import CHAMPION_ALIAS, Tag
from tasks.records.model_registry import RegisteredVersion

NO_VERSION = "none"
"""To roll back to where no version is champion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion(RegisteredVersion):
    """A version that serves, or that another model is judged against or continues."""

    folder: Path
    """Its exported model, whose files are those that were registered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RolledBack:
    """The effect of a roll-back."""

    from_version: str
    to: RegisteredVersion | None
    """None where no version is champion now."""


def decision_of(registered: RegisteredVersion) -> PromotionDecision | None:
    """Return the decision that was written down for a version, or None."""
    text = registered.tags.get(Tag.DECISION)
    return None if text is None else PromotionDecision.from_json(json.loads(text))


def champion_of(workspace: Workspace) -> Champion | None:
    """Return the champion after checking its files, or None where there is none yet."""
    registered = model_registry.version_called(workspace, CHAMPION_ALIAS)
    return None if registered is None else _verified(workspace, registered)


def champion_before(
    workspace: Workspace, day: date, *, fits: Callable[[RegisteredVersion], bool] = lambda _: True
) -> Champion | None:
    """Return the model that a night of `day` continues: the newest champion that knows only days before and fits.

    So a day that is trained once more, since its run was killed after it had made its model the champion, and one
    that is back-filled, go on from where the day began, and no weights see a day twice. A back-filled version that
    passed its gates counts as a champion here. Where none is found, the champion of now is returned.

    Where the champion of now does not fit, for instance as a feature was added, or where there is none yet, a version
    counts too that only the comparison with another model kept out, so that it becomes better night by night.
    """
    current = model_registry.version_called(workspace, CHAMPION_ALIAS)
    is_fit = current is not None and fits(current)
    if current is None or not is_fit or current.day is None or current.day >= day.isoformat():
        versions = model_registry.registered_versions(workspace)
        earlier = [
            each
            for each in _versions_by_day(versions, _counts_as_champion if is_fit else _can_be_gone_on_from)
            if (each.day or "") < day.isoformat() and fits(each)
        ]
        current = earlier[-1] if earlier else current
    return None if current is None else _verified(workspace, current)


def opponent_of(workspace: Workspace, challenger: RegisteredVersion) -> Champion | None:
    """Return the opponent of a back-filled model: the newest champion that knows no day after its own.

    The rows that judge are of the day after, so that neither has seen them. A back-filled version that passed its
    gates counts as a champion here. None where there is none.
    """
    known = [
        each
        for each in champions_by_day(model_registry.registered_versions(workspace))
        if (each.day or "") <= (challenger.day or "") and each.version != challenger.version
    ]
    return _verified(workspace, known[-1]) if known else None


def champions_by_day(versions: Sequence[RegisteredVersion]) -> list[RegisteredVersion]:
    """Return the versions that were champion, or passed their gates in a back-fill; see `_versions_by_day`."""
    return _versions_by_day(versions, _counts_as_champion)


def _versions_by_day(
    versions: Sequence[RegisteredVersion], counts: Callable[[RegisteredVersion], bool]
) -> list[RegisteredVersion]:
    """Return the versions that count and were not rolled back, by the day that they know, the newest last.

    Of one day the version that was registered last stands last.

    Args:
        versions: The newest first.
    """
    known = [
        registered
        for registered in reversed(versions)
        if registered.day is not None and counts(registered) and not is_rolled_back(registered)
    ]
    return sorted(known, key=lambda registered: registered.day or "")


def _can_be_gone_on_from(registered: RegisteredVersion) -> bool:
    decision = decision_of(registered)
    return _counts_as_champion(registered) or (decision is not None and decision.missed_comparison_alone)


def _counts_as_champion(registered: RegisteredVersion) -> bool:
    """Tell whether a version was champion, or passed its gates in a back-fill."""
    if registered.tags.get(Tag.PROMOTED) == "true":
        return True
    decision = decision_of(registered)
    return decision is not None and decision.passed_beside_champion


def is_rolled_back(registered: RegisteredVersion) -> bool:
    """Tell whether a version was rolled back after it had last become champion."""
    tags = registered.tags
    return Tag.ROLLED_BACK in tags and tags[Tag.ROLLED_BACK] >= tags.get(Tag.SINCE, "")


def _verified(workspace: Workspace, registered: RegisteredVersion) -> Champion:
    return Champion(**asdict(registered), folder=model_registry.verified_folder(workspace, registered))


def apply_decision(workspace: Workspace, decision: PromotionDecision) -> None:
    """Write a decision down and, where it promotes, let the alias name its version. May be called again.

    Once a decision was applied, another call changes nothing, also where the version was rolled back since.

    Raises:
        UnknownNameError: There is no such version.
        ConfigurationError: Another version has become champion since the decision was made, or MLflow's store does
            not answer.
    """
    with champion_lock(workspace):
        registered = model_registry.find_version(workspace, decision.version)
        if Tag.PROMOTED in registered.tags:
            return
        current = model_registry.version_called(workspace, CHAMPION_ALIAS)
        if current is not None and current.version == decision.version:
            # A process was killed after it had moved the alias.
            _mark_applied(workspace, registered, is_promoted=True)
            return
        written = {Tag.DECISION: json.dumps(decision.to_json())}
        if not decision.is_promoted:
            model_registry.tag_version(workspace, decision.version, written)
            _mark_applied(workspace, registered, is_promoted=False)
            return
        if decision.champion_version != (None if current is None else current.version):
            raise ConfigurationError(
                f"version {decision.version} can follow the champion that it was judged against, "
                f"{decision.champion_version or 'none'}, but champion is now "
                f"{'none' if current is None else current.version}; judge it again"
            )
        model_registry.verified_folder(workspace, registered)
        if current is not None:
            _make_up_for_mark(workspace, current)
        model_registry.tag_version(workspace, decision.version, {**written, Tag.SINCE: _now()})
        model_registry.call_version(workspace, decision.version, CHAMPION_ALIAS)
        _mark_applied(workspace, registered, is_promoted=True)


def roll_back(workspace: Workspace, *, to: str | None = None) -> _RolledBack:
    """Make an earlier champion the champion again, after checking its files.

    Args:
        to: Its version, or `NO_VERSION`: the next model is judged as the first then. None stands for the one before
            the champion of now.

    Raises:
        ConfigurationError: There is no champion, none before it, or `to` is champion already.
        UnknownNameError: `to` was never champion; those that were are named.
    """
    # Before the lock is made, which would leave a file where nothing was ever recorded.
    _require_champion(workspace)
    with champion_lock(workspace):
        current = _require_champion(workspace)
        _make_up_for_mark(workspace, current)
        target = None if to == NO_VERSION else _earlier_champion(workspace, current, to)
        if target is None:
            model_registry.call_version(workspace, None, CHAMPION_ALIAS)
        else:
            _crown_again(workspace, target, current=current)
        model_registry.tag_version(workspace, current.version, {Tag.ROLLED_BACK: _now()})
        model_registry.tag_run_of(workspace, current, {Tag.ROLLED_BACK: _now()})
    return _RolledBack(from_version=current.version, to=target)


def _crown_again(workspace: Workspace, target: RegisteredVersion, *, current: RegisteredVersion) -> None:
    try:
        model_registry.verified_folder(workspace, target)
    except CheckpointError as error:
        others = [version for version in _earlier_champions(workspace, current) if version != target.version]
        raise CheckpointError(
            f"{error}; champion is still {current.version}, others to go back to with --to are: "
            f"{', '.join(others) or 'none'}"
        ) from error
    model_registry.tag_version(workspace, target.version, {Tag.SINCE: _now()})
    model_registry.call_version(workspace, target.version, CHAMPION_ALIAS)


def _require_champion(workspace: Workspace) -> RegisteredVersion:
    current = model_registry.version_called(workspace, CHAMPION_ALIAS)
    if current is None:
        raise ConfigurationError(
            "there must be a champion to roll back from, but there is none yet; the first model that is better than "
            "the mean click rate becomes it"
        )
    return current


def _earlier_champion(workspace: Workspace, current: RegisteredVersion, to: str | None) -> RegisteredVersion:
    if to is None:
        decision = decision_of(current)
        if decision is None or decision.champion_version is None:
            others = _earlier_champions(workspace, current)
            way_out = (
                f"name one with --to: {', '.join(others) or f'{NO_VERSION}, so that there is no champion'}"
            )
            raise ConfigurationError(
                f"there must be a champion before version {current.version} to go back to, but it was the first; "
                f"{way_out}"
            )
        return model_registry.find_version(workspace, decision.champion_version)
    if to == current.version:
        raise ConfigurationError(f"version {to} is champion already; nothing was changed")
    if to not in _earlier_champions(workspace, current):
        raise UnknownNameError("earlier champion", to, _earlier_champions(workspace, current))
    return model_registry.find_version(workspace, to)


def _earlier_champions(workspace: Workspace, current: RegisteredVersion) -> list[str]:
    """Return all versions that were champion, but for the one that is, the newest first."""
    return [
        registered.version
        for registered in model_registry.registered_versions(workspace)
        if registered.tags.get(Tag.PROMOTED) == "true" and registered.version != current.version
    ]


def _make_up_for_mark(workspace: Workspace, current: RegisteredVersion) -> None:
    """Mark a champion as promoted whose process was killed before it could."""
    if Tag.PROMOTED not in current.tags:
        _mark_applied(workspace, current, is_promoted=True)


def _mark_applied(workspace: Workspace, registered: RegisteredVersion, *, is_promoted: bool) -> None:
    tags = {Tag.PROMOTED: str(is_promoted).lower()}
    model_registry.tag_run_of(workspace, registered, tags)
    # Last, as it ends what may be called again.
    model_registry.tag_version(workspace, registered.version, tags)


def champion_lock(workspace: Workspace) -> FileLock:
    """Return the lock that keeps other processes of this workspace from moving the alias."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    return FileLock(workspace.root / "champion.lock")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
