"""Search for the parameters of a training: which model, how large, how fast and how strongly regularised.

Each trial trains on the earlier training rows and is judged on the latest fifth of them, so held-out rows stay
unseen. Optuna proposes (TPE: Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"), and trials that
are worse than others of the same age are ended (Hyperband: Li et al. 2018, "Hyperband: A Novel Bandit-Based Approach
to Hyperparameter Optimization"). The first trial of each model has its default parameters.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.judging.quality import ClickQuality
from heterps_core.models import sized_model
from heterps_core.models.chain import load_builder
from heterps_core.text_table import Table
from heterps_core.training.job import TrainingConfig, default_dense_learning_rate
from heterps_core.training.tuning.in_one_process import train_in_turns

if TYPE_CHECKING:
    import optuna

_VALIDATION_SHARE = 0.2
"""Share of the training rows, the latest ones."""

NUM_TURNS, REDUCTION = 9, 3
"""A trial is judged after each ninth of its training; of those of one age Hyperband lets a third go on."""

RATES: Mapping[str, tuple[float, float]] = {
    "dense_learning_rate": (1e-4, 3e-2),
    "embedding_learning_rate": (3e-3, 0.5),
}
"""Ranges, searched by their logarithm."""

PENALTIES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)
_MODEL_SETTINGS: Mapping[str, Sequence[Any]] = {
    "embedding_dim": (None, 4, 8, 16, 32),
    "hidden_widths": (None, (64, 32), (128, 64), (256, 128)),
    "dropout": (None, 0.1, 0.2, 0.3, 0.5),
}
"""Choices of those that the model takes; None is its own."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One set of parameters, and what it reached on the validation rows."""

    model: str
    parameters: Mapping[str, Any]
    """Parameters of train-ctr."""

    quality: ClickQuality | None
    """After its last turn; None without one."""

    end: str
    """Complete, pruned, diverged or out of time."""

    num_turns: int
    """Finished ones of `NUM_TURNS` equal parts of its training."""

    seconds: float

    @property
    def is_complete(self) -> bool:
        """It was trained to its end."""
        return self.end == "complete"

    @property
    def log_loss(self) -> float:
        """After its last turn, infinite without one."""
        return float("inf") if self.quality is None else self.quality.log_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A finished search."""

    trials: tuple[Trial, ...]
    """In their order; the first ones have the models' defaults."""

    num_train_rows: int
    num_validation_rows: int
    seconds: float

    @property
    def best(self) -> Trial:
        """The complete trial with the least log-loss."""
        return self._ranked[0]

    @property
    def default(self) -> Trial:
        """The first one."""
        return self.trials[0]

    @property
    def _ranked(self) -> list[Trial]:
        return sorted(self.trials, key=lambda trial: (not trial.is_complete, trial.log_loss))

    def table(self) -> Table:
        """Return all trials, the best ones first."""
        return Table(
            columns={"model": "", "log-loss": ".4f", "AUC": ".4f", "s": ".1f", "end": "", "parameters": ""},
            rows=[
                (
                    trial.model,
                    None if trial.quality is None else trial.quality.log_loss,
                    None if trial.quality is None else trial.quality.auc,
                    trial.seconds,
                    trial.end,
                    ", ".join(f"{name} {_shown(value)}" for name, value in trial.parameters.items()),
                )
                for trial in self._ranked
            ],
        )


def tune(
    dataset: PreparedDataset,
    models: Sequence[str],
    *,
    batch_size: int,
    max_epochs: int,
    seconds: float,
    max_trials: int | None,
    seed: int,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuning:
    """Search until the time is over, or so many trials were made.

    Args:
        models: Registry names or import paths; the first one's defaults are what others are compared with.
        batch_size: Of all trials.
        max_epochs: Of a trial.
        seconds: That the search may take; it ends at most one step and one judgement later.
        seed: Of the search and of each training.

    Raises:
        ConfigurationError: A model cannot be built, or the time is too short for one trial.
        TrainingError: Every trial diverged.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(
            min_resource=1, max_resource=NUM_TURNS, reduction_factor=REDUCTION
        ),
    )
    num_train_rows = dataset.num_train_rows - int(dataset.num_train_rows * _VALIDATION_SHARE)
    view, rated = dataset.until(num_train_rows), (num_train_rows, dataset.num_train_rows)
    started_s = time.monotonic()
    trials: list[Trial] = []

    def is_over() -> bool:
        return time.monotonic() - started_s >= seconds

    for model in models:
        study.enqueue_trial(_default(model, max_epochs))
    while not is_over() and (max_trials is None or len(trials) < max_trials):
        asked = study.ask()
        trial = _tried(
            asked,
            view,
            _proposed(asked, models, max_epochs),
            batch_size=batch_size,
            seed=seed,
            rated=rated,
            may_prune=len(trials) >= len(models),
            is_over=is_over,
        )
        states = {"complete": optuna.trial.TrialState.COMPLETE, "pruned": optuna.trial.TrialState.PRUNED}
        value = trial.log_loss if trial.is_complete else None
        study.tell(asked, value, state=states.get(trial.end, optuna.trial.TrialState.FAIL))
        trials.append(trial)
        on_trial(trial)
    tuning = Tuning(
        trials=tuple(trials),
        num_train_rows=num_train_rows,
        num_validation_rows=rated[1] - rated[0],
        seconds=time.monotonic() - started_s,
    )
    _check_any_complete(tuning, seconds)
    return tuning


def _tried(
    asked: optuna.Trial,
    dataset: PreparedDataset,
    parameters: dict[str, Any],
    *,
    batch_size: int,
    seed: int,
    rated: tuple[int, int],
    may_prune: bool,
    is_over: Callable[[], bool],
) -> Trial:
    """Train with some parameters, until Optuna ends the trial or the time is over."""
    started_s, quality, num_turns, end = time.monotonic(), None, 0, "out of time"
    model = sized_model(parameters["model"], **_sizes(parameters))
    config = _config(parameters, batch_size=batch_size, seed=seed)
    try:
        for quality in train_in_turns(
            dataset, model, config, rated=rated, num_turns=NUM_TURNS, is_over=is_over
        ):
            num_turns += 1
            asked.report(quality.log_loss, num_turns)
            if num_turns == NUM_TURNS:
                end = "complete"
            elif may_prune and asked.should_prune():
                end = "pruned"
                break
    except TrainingError as problem:
        logger.info("a trial ended: %s", problem)
        quality, end = None, "diverged"
    return Trial(
        model=parameters.pop("model"),
        parameters=parameters,
        quality=quality,
        end=end,
        num_turns=num_turns,
        seconds=time.monotonic() - started_s,
    )


def _check_any_complete(tuning: Tuning, seconds: float) -> None:
    """Check that a search of so many seconds has found parameters; raises as `tune`."""
    if any(trial.is_complete for trial in tuning.trials):
        return
    ended = ", ".join(
        f"{trial.model} {trial.end} after {trial.num_turns}/{NUM_TURNS} of its training in {trial.seconds:.1f} s"
        for trial in tuning.trials
    )
    slow = [trial for trial in tuning.trials if trial.end != "diverged"]
    if tuning.trials and not slow:
        raise TrainingError(
            f"a trial must end with a finite loss, but {ended}; look at the numbers of numeric columns, or take "
            f"another model"
        )
    needed_s = [trial.seconds * NUM_TURNS / trial.num_turns for trial in slow if trial.num_turns]
    needed = f"; one needs about {min(needed_s) / 60:.2g} minutes of a core" if needed_s else ""
    raise ConfigurationError(
        f"the budget must last for one trial at least, but in {seconds / 60:.3g} minutes none came to its end on "
        f"{tuning.num_train_rows:,} rows ({ended or 'none began'}){needed}; raise it, or take fewer rows or a "
        f"smaller model"
    )


def _proposed(trial: Any, models: Sequence[str], max_epochs: int) -> dict[str, Any]:
    """Return the parameters of a trial as train-ctr takes them, with the model."""
    model = trial.suggest_categorical("model", list(models)) if len(models) > 1 else models[0]
    found: dict[str, Any] = {"model": model, "epochs": trial.suggest_int("epochs", 1, max_epochs)}
    for name, (low, high) in RATES.items():
        found[name] = trial.suggest_float(name, low, high, log=True)
    for name in ("dense_l2", "embedding_l2"):
        found[name] = trial.suggest_categorical(name, PENALTIES)
    for name in _taken(model):
        # Named after the model: a width that suits one says little of another.
        choice = trial.suggest_categorical(f"{model} {name}", range(len(_MODEL_SETTINGS[name])))
        if (value := _MODEL_SETTINGS[name][choice]) is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    if (dropout := found.pop("dropout", None)) is not None:
        found["model_settings"] = {"dropout": dropout}
    return found


def _default(model: str, max_epochs: int) -> dict[str, Any]:
    """Return what a study is to try first: a model's own sizes and rates, and no penalties."""
    rates = {
        "dense_learning_rate": default_dense_learning_rate(model),
        "embedding_learning_rate": _config({}, batch_size=1, seed=0).embedding_learning_rate,
    }
    sizes = dict.fromkeys((f"{model} {name}" for name in _taken(model)), 0)
    return {"model": model, "epochs": 1, "dense_l2": 0.0, "embedding_l2": 0.0, **rates, **sizes}


def _taken(model: str) -> list[str]:
    known = inspect.signature(load_builder(model)).parameters
    return [name for name in _MODEL_SETTINGS if name in known]


def _sizes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: parameters.get(name) for name in ("hidden_widths", "embedding_dim")}
    return {**sizes, **parameters.get("model_settings", {})}


def _config(parameters: Mapping[str, Any], *, batch_size: int, seed: int) -> TrainingConfig:
    numbers = {name: parameters[name] for name in (*RATES, "dense_l2", "embedding_l2") if name in parameters}
    epochs = parameters.get("epochs", 1)
    return TrainingConfig(batch_size=batch_size, num_microbatches=1, num_epochs=epochs, seed=seed, **numbers)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
