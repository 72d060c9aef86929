"""All scenarios, by name."""

from collections.abc import Mapping

from tools.faults import clients, processes, storage, system, upstreams
from tools.faults.judge import Scenario

SCENARIOS: Mapping[str, Scenario] = {
    **processes.SCENARIOS,
    **storage.SCENARIOS,
    **system.SCENARIOS,
    **clients.SCENARIOS,
    **upstreams.SCENARIOS,
}
