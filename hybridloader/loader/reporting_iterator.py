"""Iterator of a loader that tells statistics while the loop runs, for ``observe=Observe(...)``."""

from __future__ import annotations

from typing import Any

from hybridloader.loader.iterator import LoaderIterator
from hybridloader.loader.plan import LoaderPlan
from hybridloader.observe.reporting import Observe, Reporter


class ReportingIterator(LoaderIterator):
    """Iterator that calls `on_stats` between two batches, and at the end of each pass."""

    _reporter: Reporter | None = None
    """None until the first pass has begun."""

    def __init__(self, loader: Any, plan: LoaderPlan) -> None:
        super().__init__(loader, plan)
        policy = plan.options.observe
        if isinstance(policy, Observe) and self._observation is not None:
            self._reporter = Reporter(policy, self._observation.stats)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        if self._reporter is not None:
            self._reporter.begin()

    def _next_data(self) -> Any:
        reporter = self._reporter
        if reporter is None:
            return super()._next_data()
        reporter.look()
        try:
            return super()._next_data()
        except StopIteration:
            reporter.end()
            raise
