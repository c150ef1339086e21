"""Search learning rates, sizes, penalties, epochs and the model itself on this machine. Trials train on the earlier
training rows and are judged by log-loss on the latest fifth of them; held-out rows stay unseen. The file that it
writes is what heterps train takes.

examples:
  heterps tune --data clicks.tsv.gz --minutes 30 --output tuned.json
  heterps tune --data clicks.tsv.gz --models deepfm dcnv2 lr --usd 0.05 --output tuned.json
  heterps train --data clicks.tsv.gz --parameters tuned.json

exit status: 0 with a file; 2 where an argument or a row cannot be used, or the budget is too small for one trial.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flows.command_line import add_options
from flows.parameters import LARGEST_SEED, BatchSize, Count, Day, SourceParameters, Usd, of_unit
from heterps_core.errors import ConfigurationError
from heterps_core.json_file import write_json
from heterps_core.models import DEFAULT_MODEL
from heterps_core.units import SECONDS_PER_HOUR, ratio
from infra.workspace import Workspace

PRICED_AS = "cpu-c7i"
"""Device type whose price on demand turns USD into time: a trial takes one of its cores, as it takes one here."""


class _TuneParameters(SourceParameters):
    """Parameters of a search."""

    day: Day | None = None
    """Day to train on, for data that is cut into days; empty for the latest whose next day is there too."""

    models: list[str] = Field([DEFAULT_MODEL], min_length=1)
    """Names of models, or your own as package.module:function; the first one's defaults are the comparison."""

    batch_size: BatchSize | None = None
    """Samples per training step; empty to choose it from the number of rows."""

    max_epochs: Count = 3
    """Most passes of a trial over its rows."""

    minutes: Annotated[float, of_unit("minutes", gt=0)] | None = None
    """Longest time of the search."""

    usd: Usd | None = None
    """Highest cost of the search on a core of cpu-c7i at list prices; the tighter of usd and minutes counts."""

    trials: Count | None = None
    """Most trials; empty for as many as the budget lasts."""

    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """Seed of the search and of each training."""

    output: str
    """JSON file to write."""

    def check(self) -> None:
        """Check names, files and budget, in milliseconds; a model of one's own in seconds."""
        from tasks.profiling import check_model_name

        if self.minutes is None and self.usd is None:
            raise ConfigurationError("a search needs a budget: give --minutes or --usd")
        if not Path(self.output).absolute().parent.is_dir():
            raise ConfigurationError(f"output must be a file in a folder that is there, got {self.output}")
        for model in self.models:
            check_model_name(model)
        self.source.check(self.day)
        self.source.check_columns(self.day)

    @property
    def seconds(self) -> float:
        """The budget."""
        from heterps_core.planning.provisioning.offer_choice import unit_prices
        from tasks.provisioning import find_offers

        seconds = [] if self.minutes is None else [self.minutes * 60]
        if self.usd is not None:
            usd_per_hour = unit_prices(find_offers.fn([PRICED_AS]))[PRICED_AS]
            seconds.append(ratio(self.usd, usd_per_hour, otherwise=math.inf) * SECONDS_PER_HOUR)
        return min(seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_options(parser, _TuneParameters)


def run(options: argparse.Namespace) -> None:
    """Search, print the trials and write the parameter file."""
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if name != "run"}
    asked = _TuneParameters.of(given)
    asked.check()
    from heterps_core.training.job import default_batch_size
    from heterps_core.training.tuning.search import Trial, tune
    from tasks.data import prepare_data
    from tasks.records.tracking import record_tuning

    workspace = Workspace.locate().create()
    clicks = prepare_data.fn(workspace, asked.source, night=asked.source.night(asked.day))
    print(f"data         {clicks.summary}")
    dataset = clicks.open()
    batch_size = asked.batch_size or default_batch_size(dataset.num_train_rows)

    def tell(trial: Trial) -> None:
        quality = "" if trial.quality is None else f", log-loss {trial.quality.log_loss:.4f}"
        print(f"trial        {trial.model}: {trial.end}{quality}, {trial.seconds:.1f} s", flush=True)

    tuning = tune(
        dataset,
        asked.models,
        batch_size=batch_size,
        max_epochs=asked.max_epochs,
        seconds=asked.seconds,
        max_trials=asked.trials,
        seed=asked.seed,
        on_trial=tell,
    )
    best = tuning.best
    found = {"model": best.model, "batch_size": batch_size, **best.parameters}
    write_json(Path(asked.output), found)
    record_tuning(workspace, tuning, found, data=asked.source.name)
    print("\n".join(tuning.table().lines()))
    assert best.quality is not None
    default = tuning.default.quality
    compared = "" if default is None else f", {default.log_loss:.4f} with the defaults of {asked.models[0]}"
    print(
        f"found        log-loss {best.quality.log_loss:.4f}{compared}, on the latest "
        f"{tuning.num_validation_rows:,} training rows; {len(tuning.trials)} trials in {tuning.seconds:.0f} s: "
        f"{asked.output}"
    )
