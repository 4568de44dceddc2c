"""Workers on Ray: the contract suite, over one cluster for the session."""

from __future__ import annotations

import pytest

ray = pytest.importorskip("ray")

from hybridloader.backends.ray import Ray  # noqa: E402
from hybridloader.testing import BackendContract  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class TestRay(BackendContract):
    backend = Ray(num_cpus=0.5)
