"""Types of flow parameters, from which Prefect draws its form: lists of names to choose from, and bounds of numbers.

They are in the form alone. What is wrong is told by the checks of each flow, in words that name the way out, and for
the command line too; the server refuses what is outside them when it is asked for a run.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from heterps_core.hardware import Market
from heterps_core.planning.problem.extra_costs import COST_TERMS
from heterps_core.planning.search.schedulers import SCHEDULERS
from infra.providers import PROVIDERS
from tasks.planning.parameter_ranges import LARGEST_SEED, LEAST
from tasks.running.start import START_NAMES

DEFAULT_DEVICE_TYPES = ["cpu-c7i", "cpu-r6in", "gpu-t4", "gpu-t4-20gbit"]

SchedulerName = Annotated[str, Field(json_schema_extra={"enum": sorted(SCHEDULERS)})]
ProviderName = Annotated[str, Field(json_schema_extra={"enum": sorted(PROVIDERS)})]
MarketName = Annotated[str, Field(json_schema_extra={"enum": [str(market) for market in Market]})]
CostTerm = Annotated[str, Field(json_schema_extra={"enum": sorted(COST_TERMS)})]
StartName = Annotated[str, Field(json_schema_extra={"enum": list(START_NAMES)})]
Day = Annotated[str, Field(json_schema_extra={"pattern": r"^\d{4}-\d{2}-\d{2}$"})]

Count = Annotated[int, Field(json_schema_extra={"minimum": 1})]
RowCount = Annotated[int, Field(json_schema_extra={"minimum": LEAST["planned_rows_per_slot"]})]
BatchSize = Annotated[int, Field(json_schema_extra={"minimum": LEAST["batch_size"]})]
Seed = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": LARGEST_SEED})]
Throughput = Annotated[float, Field(json_schema_extra={"minimum": 0})]
Usd = Annotated[float, Field(json_schema_extra={"exclusiveMinimum": 0})]
