"""Searches the plan of a night in one region, by the measured times of one precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flows.night.run import OpenedRun
from heterps_core.data.distinct_values import tables_table
from heterps_core.data.reading.days import parse_day
from heterps_core.hardware import InstanceOffer, Market, hardware_name
from heterps_core.planning.calibration import Calibration, Correction
from heterps_core.planning.explain.reasons import OtherPlan
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.search_result import SearchResult
from heterps_core.training.job import TrainingConfig
from infra.prices.service_charges import Rates
from infra.providers import get_provider
from tasks import scheduling
from tasks.planning.deadline import Deadline, PlanningTime, explained_by, floor_text, floor_with
from tasks.planning.extra_costs import Crossing, job_extra_costs
from tasks.planning.problems import make_problems, problem_of_cheapest_zone
from tasks.planning.regions import Found
from tasks.planning.table_disks import dry_run_table_memory_bytes, table_memory_bytes
from tasks.planning.wire_format import FULL, search_with_wire_dtype
from tasks.profiling import PlannedJob, ProfiledModel
from tasks.provisioning import (
    Provisioning,
    check_lifetime,
)
from tasks.reports.run_report import PlanReport, plan_summary, taken_text
from tasks.reports.tables import cuts_table
from tasks.running.progress import log_step
from tasks.training import training_config


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """The search for the plan of a run in a region, by times, offers and past runs."""

    run: OpenedRun
    job: PlannedJob
    deadline: Deadline | None
    device_types: Sequence[str]
    others: Sequence[str]
    """Device types without a machine image; their plans are shown where they cost less."""

    profiled: ProfiledModel
    offers: Sequence[InstanceOffer]
    learning: Calibration
    planning_time: PlanningTime
    crossing: Crossing
    rates: Rates
    most_units: Mapping[str, int]
    """Of device types, by the account's quotas."""

    def found(self) -> Found:
        """Search the plan, and its number format where none is asked for."""
        with explained_by(self.deadline):
            longest_list = max(self.run.dataset.features.slot_lengths)
            return search_with_wire_dtype(
                self.run.asked.wire_dtype, self.with_wire_dtype, longest_list=longest_list
            )

    def first_problems(self) -> list[SchedulingProblem]:
        """Return the problem of each zone that is searched first."""
        return self._problems(self.device_types, self.run.asked.wire_dtype or FULL)

    def with_wire_dtype(self, wire_dtype: str) -> tuple[SchedulingProblem, scheduling.Searches]:
        """Search a plan in time whose workers send in a number format."""
        asked = self.run.asked
        steady_types = [name for name in self.device_types if hardware_name(name) == name]
        has_both = self.deadline is not None and {*asked.markets} == {*Market} and bool(steady_types)
        return scheduling.search_in_time(
            self._problem(self.device_types, wire_dtype),
            self._problem(steady_types, wire_dtype) if has_both else None,
            self.deadline,
            search=self._search,
            max_usd_per_hour=asked.max_usd_per_hour,
        )

    def _problem(self, device_types: Sequence[str], wire_dtype: str) -> SchedulingProblem:
        problems = self._problems(device_types, wire_dtype)
        return self.learning.corrected(problem_of_cheapest_zone(problems, self.planning_time))

    def _problems(self, device_types: Sequence[str], wire_dtype: str) -> list[SchedulingProblem]:
        asked = self.run.asked
        return make_problems(
            self.profiled,
            self.offers,
            self.job,
            device_types=device_types,
            num_epochs=asked.epochs,
            throughput_floor_samples_per_s=floor_with(self.deadline, asked.throughput_floor_samples_per_s),
            extra_costs=job_extra_costs(
                self.profiled.planned_graph,
                profiling_usd=self.profiled.profiling_usd(self.run.run_id),
                is_rented=not get_provider(asked.provider).has_inventory,
                rates=self.rates,
                crossing=self.crossing,
            ),
            rates=self.rates,
            update_mode=asked.update_mode,
            wire_dtype=wire_dtype,
            most_units=self.most_units,
        )

    def _search(self, problem: SchedulingProblem) -> scheduling.Searches:
        asked = self.run.asked
        return scheduling.search_chosen(
            problem,
            scheduler=asked.scheduler,
            budget_evaluations=asked.budget_evaluations,
            seed=asked.seed,
            # With a deadline, faster plans and those without spot machines are proven as well.
            max_seconds=self.planning_time.share(1 if self.deadline is None else 2),
        )

    def _not_rentable(
        self, problem: SchedulingProblem, chosen: SearchResult, wire_dtype: str
    ) -> OtherPlan | None:
        """Return a cheaper plan of the chosen one's device types and those without an image."""
        if not self.others:
            return None
        used = dict.fromkeys(name for stage in chosen.plan.stages for name in stage.replicas_by_type)
        wider = self._problem([*used, *self.others], wire_dtype)
        floor = problem.throughput_floor_samples_per_s
        return scheduling.cheaper_plan(replace(wider, throughput_floor_samples_per_s=floor), chosen)

    def log_found(self, problem: SchedulingProblem, searches: scheduling.Searches) -> None:
        """Log the plan that was found, and check that its machines live long enough."""
        asked = self.run.asked
        log_step("calibrated", self.learning.summary(problem))
        floor = floor_text(
            self.deadline,
            asked.throughput_floor_samples_per_s,
            planned_with=problem.throughput_floor_samples_per_s,
        )
        taken = taken_text(searches, asked.scheduler)
        log_step("plan", plan_summary(searches.chosen.plan) + floor + taken)
        if not self.run.is_resumed:
            check_lifetime(searches.chosen.evaluation, provider=asked.provider)

    def config(
        self, problem: SchedulingProblem, chosen: SearchResult, bought: Provisioning, *, wire_dtype: str
    ) -> TrainingConfig:
        """Return the numbers of a run: those that were asked for, and those of its plan."""
        run, asked = self.run, self.run.asked
        settings = run.training_numbers | {
            "wire_dtype": wire_dtype,
            "precision": self.profiled.planned_request.precision,
            "embedding_memory_bytes": asked.embedding_memory_bytes
            or self._memory_bytes(problem, chosen, bought),
        }
        return training_config(
            run.dataset,
            epochs=asked.epochs,
            max_samples=asked.max_samples,
            num_stages=len(bought.launch_stages),
            samples_per_s=0.0 if run.is_dry_run else chosen.evaluation.throughput_samples_per_s,
            interruptions_per_hour=chosen.evaluation.interruptions_per_hour,
            day_number=0 if asked.day is None else parse_day(asked.day).toordinal(),
            **settings,
        )

    def _memory_bytes(
        self, problem: SchedulingProblem, chosen: SearchResult, bought: Provisioning
    ) -> int | None:
        """Return the memory of a worker for rows of tables; None where the plan holds all in memory."""
        run, memory_bytes = self.run, table_memory_bytes(problem, chosen.evaluation)
        if not run.is_dry_run or memory_bytes is None:
            return memory_bytes
        return dry_run_table_memory_bytes(
            memory_bytes,
            (self.profiled.planned_graph, chosen.plan.stages),
            dataset=run.dataset,
            model=run.asked.sized_model,
            stages=bought.launch_stages,
            embedding_optimizer=run.asked.embedding_optimizer,
            batch_size=run.batch_size,
            seed=run.asked.seed,
        )

    def report(
        self,
        problem: SchedulingProblem,
        searches: scheduling.Searches,
        provisioning: Provisioning,
        config: TrainingConfig,
        region: str,
    ) -> PlanReport:
        """Return the report of the plan that was found."""
        run, profiled, chosen = self.run, self.profiled, searches.chosen
        dataset = run.dataset
        prediction, correction = None, Correction()
        hardware = " | ".join(dict.fromkeys(stage.device_types for stage in provisioning.launch_stages))
        if run.is_dry_run:
            prediction = scheduling.predict_dry_run_here(
                profiled,
                provisioning.launch_stages,
                config,
                decoded_share=dataset.decoded_share(dataset.num_train_rows, batch_size=config.batch_size),
            )
            hardware = profiled.local_profile.hardware_fingerprint
            correction = self.learning.correction(hardware, model=problem.model)
        return PlanReport(
            run_id=run.run_id,
            model=run.asked.sized_model,
            data=run.clicks.description,
            num_train_rows=dataset.num_train_rows,
            num_eval_rows=dataset.num_eval_rows,
            problem=problem,
            searches=searches,
            scheduler=run.asked.scheduler,
            explanation=scheduling.explain_choice(
                problem, chosen, self._not_rentable(problem, chosen, config.wire_dtype), region
            ),
            simulation=scheduling.simulate_choice(problem, chosen),
            provisioning=provisioning,
            tracked=run.tracked,
            config=config,
            prediction=prediction,
            correction=correction,
            hardware=hardware,
            uncounted=profiled.graph.uncounted_text,
            busy=profiled.local_profile.busy_text,
            tables=tables_table(
                dataset.manifest.columns,
                dataset.features.slot_rows,
                has_dynamic_ids=dataset.features.dynamic_ids is not None,
            ),
            cuts=cuts_table(run.asked.sized_model, dataset.features, chosen.plan.stages),
            day=run.asked.day,
        )
