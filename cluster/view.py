"""What list and top print, of jobs and the queue's state."""

import dataclasses
import time
from collections.abc import Sequence

from cluster.deciding import Host


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def duration(seconds: float) -> str:
    """7 s, 12 min, 3.4 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def runs(jobs: Sequence, state: dict) -> list[dict]:
    """One object for each run that Ray still knows, the oldest first. No environment, no secrets."""
    places = {run["name"]: run for run in state.get("running", [])}
    waiting = [run["name"] for run in state.get("waiting", [])]
    found = []
    for job in sorted(jobs, key=lambda job: job.start_time or 0):
        about = job.metadata or {}
        if about.get("program") != "python -m cluster":
            continue
        name, status, code = job.submission_id, str(job.status.value), job.driver_exit_code
        if name in places:
            says = "running"
        elif name in waiting:
            says = f"waiting, {waiting.index(name) + 1} of {len(waiting)}"
        elif status in ("PENDING", "RUNNING"):
            says = "starting"
        elif status == "SUCCEEDED":
            says = "done"
        elif status == "STOPPED" or code in (130, 143):
            says = "stopped"
        else:
            says = f"failed ({'killed' if code is None else code})"
        found.append(
            {
                "name": name,
                "user": about.get("user", "?"),
                "script": about.get("script", "?"),
                "chips": int(about.get("chips", 0)) * int(about.get("hosts", 1)),
                "slice": about.get("kind", ""),
                "state": says,
                "seconds": ((job.end_time or time.time() * 1000) - (job.start_time or 0)) / 1000,
            }
        )
    return found


def show_list(found: Sequence[dict]) -> str:
    if not found:
        return "no runs"
    rows = [["name", "user", "chips", "state", "since submitted", "script"]]
    for run in found:
        chips = f"{run['chips']}{' ' + run['slice'] if run['slice'] else ''}"
        rows.append([run["name"], run["user"], chips, run["state"], duration(run["seconds"]), run["script"]])
    return table(rows)


def top(state: dict, live: Sequence[Host], address: str, now: float) -> dict:
    """Who runs what on how many chips, who waits, how full the cluster is. live: the hosts that are there now."""
    hosts = {host.node: dataclasses.asdict(host) for host in live}
    in_use: dict[str, int] = dict.fromkeys(hosts, 0)
    for run in state.get("running", []):
        for node, chips in run["places"]:
            in_use[node] = in_use.get(node, 0) + len(chips)
    since = max(0.0, now - state.get("time", now))  # the queue writes when it is asked
    busy = state.get("busy_seconds", 0.0) + since * sum(in_use.values())
    whole = state.get("chip_seconds", 0.0) + since * sum(host.chips for host in live)
    shown = [host | {"in_use": in_use[node]} for node, host in hosts.items()]
    return {
        "dashboard": address,
        "chips": sum(host["chips"] for host in shown),
        "in_use": sum(in_use.values()),
        "utilisation": busy / whole if whole else 0.0,
        "hosts": shown,
        "running": state.get("running", []),
        "waiting": state.get("waiting", []),
        "quota": state.get("quota", {}),
        "quota_problem": state.get("quota_problem", ""),
    }


def show_top(found: dict, now: float) -> str:
    chips, in_use = found["chips"], found["in_use"]
    lines = [
        f"chips      {in_use} of {chips} in use; {100 * found['utilisation']:.0f} % of chip time since the queue began",
        f"dashboard  {found['dashboard']}",
    ]
    if found["quota_problem"]:
        lines.append(f"warning    {found['quota_problem']}")
    rows = [["host", "slice", "in use"]]
    for host in found["hosts"]:
        where = f"{host['slice_name']} ({host['kind']})" if host["slice_name"] else host["kind"] or "-"
        rows.append([f"{host['address']} ({host['node'][:8]})", where, f"{host['in_use']} of {host['chips']}"])
    lines += ["", table(rows)]
    rows = [["run", "user", "chips", "priority", "state"]]
    shown = [(run, f"runs for {duration(now - run['started'])}") for run in found["running"]]
    for place, run in enumerate(found["waiting"], 1):
        shown.append((run, f"waits for {duration(now - run['since'])}, {place} of {len(found['waiting'])}"))
    rows += [[run["name"], run["user"], str(run["chips"]), str(run["priority"]), text] for run, text in shown]
    return "\n".join([*lines, "", table(rows) if len(rows) > 1 else "nobody runs, nobody waits"])
