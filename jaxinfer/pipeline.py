"""Planned steps until their results are read, and those that fail on the way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxinfer.runner.model_runner import ModelRunner, PendingStep
from jaxinfer.scheduler.plan import RowResult, StepPlan


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step without results, and the ones dispatched after it, which computed on what it left."""

    plan: StepPlan
    error: Exception
    lost: tuple[StepPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A step that is planned, all but its masks: they depend on what the step before it samples."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step and what it produced, one result per planned row."""

    plan: StepPlan
    results: list[RowResult]


class Pipeline:
    """The steps in flight, oldest first.

    A step fails when it is dispatched or when its results are read. Either way that shows in
    `collect`, after the steps before it have been read: the first to fail is the one to blame.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps: deque[PendingStep | FailedStep | HeldStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_broken(self) -> bool:
        """Whether the newest step could not be dispatched, so that no other can be."""
        return bool(self._steps) and isinstance(self._steps[-1], FailedStep)

    def dispatch(self, plan: StepPlan, masks: np.ndarray | None) -> None:
        """Starts a step."""
        try:
            self._steps.append(self._runner.dispatch(plan, masks))
        except Exception as error:
            self.fail(plan, error)

    def hold(self, plan: StepPlan) -> None:
        """Takes a step that is to be dispatched once the one before it has been collected."""
        self._steps.append(HeldStep(plan))

    def take_held(self) -> StepPlan | None:
        """Returns the step that is held and forgets it, if no other is before it."""
        if not (self._steps and isinstance(self._steps[0], HeldStep)):
            return None
        held = self._steps.popleft()
        return held.plan

    def fail(self, plan: StepPlan, error: Exception) -> None:
        """Takes a step that cannot be started."""
        self._steps.append(FailedStep(plan, error))

    def collect(self) -> FinishedStep | FailedStep:
        """Waits for the oldest step; none is left in flight after one that failed."""
        oldest = self._steps.popleft()
        assert not isinstance(oldest, HeldStep)
        if isinstance(oldest, PendingStep):
            try:
                return FinishedStep(oldest.plan, self._runner.collect(oldest))
            except Exception as error:
                oldest = FailedStep(oldest.plan, error)
        lost = tuple(step.plan for step in self._steps)
        self._steps.clear()
        return FailedStep(oldest.plan, oldest.error, lost)
