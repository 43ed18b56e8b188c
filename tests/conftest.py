"""Tests run in one process a core (`-n auto`); each keeps to its core, for pools of threads that share cores fight."""

import os
from typing import Any

_worker = os.environ.get("PYTEST_XDIST_WORKER")
if _worker and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests measured for people to read: lines that they gave `record_property("measured", ...)`."""
    reports = terminalreporter.stats.get("passed", [])
    lines = [line for report in reports for name, line in report.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
