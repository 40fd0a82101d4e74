"""What the TPU compiler said about one training step: a record, its text, and a table of several.

One number comes first: the predicted step, the compiler's estimate and what the rule adds for operations without one.
Communication stands beside it, as a range of the step: from all hidden that the schedule lets hide to nothing hidden.
"""

import dataclasses
from collections.abc import Sequence

from tpu_compiler.estimate.rules import RULE
from tpu_utils.base.hardware import GIB, parse_topology

LABEL = "not measured: estimate, and by rule what has no price; communication apart"
ESTIMATE_LABEL = "compiler estimate alone, not measured; excludes flash kernels, all else without estimate, collectives"
ERROR = (
    "real time of 28 published steps was 21 % below to 34 % above the prediction: v4 -2 to +0 %, v5e -19 to -12 %, "
    "v5p -16 to +25 %, v6e -21 to +34 %, TPU7x -4 to +2 %; tools.calibrate measures your chip"
)
"""As benchmarks/published/results.json has it."""
ALL_HIDDEN = "all hidden that the schedule can hide"
HALF = "the compiler's cost model assumes about half the published bandwidth"
PLANNED = "it planned the step and did not compile it: memory of the program itself is estimated"
ROOFLINE = (
    "not measured: products and memory at the shares of their peaks that steps reached on v6e; communication apart, "
    "over the links of a chip in a corner"
)
PLAN_ERROR = (
    "of 8B models on v6e, plans said as hardware did of 119 of 134 that fit or not, and of 23 of 26 changes of 3 % or "
    "more; half of the steps took within 7 % of the plan, 104 of 133 within 15 %; other steps compile to 0.9 to 1.9 "
    "times their plan, below a millisecond to 2 to 27 times"
)
GIVEN_PLAN_ERROR = (
    "on v6e, plans of others' programs said as hardware did of 102 of 111 that fit or not, of loops over the layers 68 "
    "of 69, and of 17 of 21 changes of 3 % or more; half of the steps took within 4 % of the plan, 92 of 104 within "
    "15 %"
)
"""As docs/results/decisions_scores.csv, decisions_programs_scores.csv, plans.csv and docs/published.md have it."""
COMMUNICATION_LABEL = "lower bound: bytes over link bandwidth, not measured"
NETWORK_LABEL = "lower bound: bytes over the data center network's {:.4g} GB/s a device, not measured"


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says about one step on one slice. Bytes and FLOPs are per device unless they say otherwise.

    predicted_* are the figures to go by; with_prediction() works them out. estimated_* leave out every operation that
    the compiler has no price for, flash kernels among them.
    """

    topology: str
    devices: int
    program: str  # "one device", "one device, 3 of the slice idle", "SPMD over 8 devices", "8 replicas"
    compiles: bool
    fits: bool
    reason: str  # the compiler's own words when it does not compile or fit
    limit_bytes: int
    peak_bytes: int = 0  # the sum of memory below, which decides whether the step fits
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    # the compiler's own: inputs, and the most of one memory; of a small program on-chip memory, of one with more on the
    # host than on the device the host's
    compiler_peak_bytes: int = 0
    flops: float = 0.0
    traced: str = ""  # a hash of the traced program: answer.traced_hash()
    loops: int = 0  # in the program; flops counts the body of each once
    model_flops: float | None = None  # for a step, all devices
    flops_ratio: float | None = None  # compiled over model: above 1 is recomputation and padding; None with loops
    collectives: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    communication_lower_bound_ms: float = 0.0
    communication_label: str = COMMUNICATION_LABEL
    slice_transfers: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # what leaves the slice
    network_gb_per_s: float | None = None  # from a device to other slices; None: no figure is published
    host_transfers: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # "to host", "from host"
    host_transfer_ms: float = 0.0  # both directions one after the other, at the published bandwidth of PCIe
    exposed_ms: float = 0.0  # communication and host transfers that the schedule cannot hide, at least
    predicted_ms: float | None = None  # estimated_ms + ruled_ms
    predicted_ms_all_hidden: float | None = None  # with exposed_ms, and not less than slices need between them
    predicted_ms_nothing_hidden: float | None = None  # with all bounds of communication and host transfers
    predicted_per_second: float | None = None  # examples or tokens, all devices, by predicted_ms
    predicted_mfu: float | None = None  # by predicted_ms
    estimated_ms: float | None = None  # leaves out whatever the compiler has no price for
    estimated_per_second: float | None = None  # by estimated_ms
    estimated_mfu: float | None = None  # by estimated_ms
    estimate_label: str = ESTIMATE_LABEL
    calibration: str = ""  # what was measured on this chip, as calibration.Calibration.sentence says it
    price: float | None = None  # the user's, of a chip for an hour
    tokens: float | None = None  # or examples, that the run is to see; None: a billion
    unit: str = "examples"
    operations_without_estimate: dict[str, int] = dataclasses.field(default_factory=dict)
    ruled_ms: float = 0.0  # what rules.py adds for them; not in estimated_ms
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # kernels without any price, times a step
    assumed: list[str] = dataclasses.field(default_factory=list)  # of loops and conditionals, what no text says
    moved_bytes: float = 0.0  # read from and written to main memory by operations
    costliest_operations: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # of --hlo, milliseconds
    costliest_lines: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # source line, milliseconds
    costliest_modules: list[tuple[str, float]] = dataclasses.field(default_factory=list)  # layers.3.mlp, milliseconds
    module_groups: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)  # layers.*.mlp, how many, ms
    # bytes, kind, source line, module; not the live buffers: which results share memory is not in the program's text
    largest_results: list[tuple[int, str, str, str]] = dataclasses.field(default_factory=list)
    level: str = ""  # conservative, balanced or aggressive, of a module without a script
    notes: list[str] = dataclasses.field(default_factory=list)  # what was chosen for such a module
    decode: dict = dataclasses.field(default_factory=dict)  # what one token costs, and what binds it
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    asked_seconds: float = 0.0  # the script's whole process took, when compile_script asked it
    from_cache: bool = False
    host_peak_gib: float = 0.0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)

    @property
    def slice_lower_bound_ms(self) -> float | None:
        """Least time to send a step's bytes to other slices; None where the speed of that network is not known."""
        return self.sent_bytes / self.network_gb_per_s / 1e6 if self.network_gb_per_s else None

    @property
    def sent_bytes(self) -> float:
        """What a device sends to other slices in a step."""
        return sum(kind["sent_bytes"] for kind in self.slice_transfers.values())

    @property
    def memory_text(self) -> str:
        """'5.35 of 15.75 GiB'."""
        return f"{self.peak_bytes / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB"

    @property
    def over_bytes(self) -> int:
        return max(0, self.peak_bytes - self.limit_bytes)

    @property
    def flops_per_device(self) -> float:
        """FLOPs of a step on a device. The model's if larger: the compiler counts the body of a loop only once."""
        return max(self.model_flops / self.devices if self.model_flops else 0.0, self.flops)

    @property
    def compute_ms(self) -> float:
        """Milliseconds of a step that the matrix units need at their published peak."""
        hardware = parse_topology(self.topology).hardware
        return self.flops_per_device / (hardware.bf16_tflops / hardware.devices_per_chip * 1e9)

    @property
    def memory_ms(self) -> float:
        """Milliseconds of a step that main memory needs for the bytes moved, at its published bandwidth."""
        hardware = parse_topology(self.topology).hardware
        return self.moved_bytes / (hardware.memory_gb_per_s / hardware.devices_per_chip * 1e6)

    @property
    def is_memory_bound(self) -> bool:
        """Moving bytes takes longer than the products, and is no small part of the step even at the full bandwidth."""
        return self.memory_ms > max(self.compute_ms, (self.predicted_ms or 0.0) / 4)

    def with_prediction(self) -> "Report":
        """With predicted_* worked out from the other fields."""
        if self.estimated_ms is None:
            return self
        ms, network = self.estimated_ms + self.ruled_ms, self.slice_lower_bound_ms or 0.0
        share = self.estimated_ms / ms if ms else 0.0
        return dataclasses.replace(
            self,
            predicted_ms=ms,
            predicted_ms_all_hidden=max(ms + self.exposed_ms, network),
            predicted_ms_nothing_hidden=ms + self.communication_lower_bound_ms + self.host_transfer_ms + network,
            predicted_per_second=self.estimated_per_second and self.estimated_per_second * share,
            predicted_mfu=self.estimated_mfu and self.estimated_mfu * share,
        )

    def mfu_at(self, ms: float) -> float | None:
        """Model FLOPs of a step of so many milliseconds over the peak of all devices."""
        return self.predicted_mfu * self.predicted_ms / ms if self.predicted_mfu and ms else None

    @property
    def exit_code(self) -> int:
        return 0 if self.fits else 1


Rows = list[tuple[str, str]]
"""(name, text) of each line of a report; the name is empty where a line goes on with the one above."""


def format_report(r: Report) -> str:
    """The report as text, a fact a line."""
    verdict = "fits" if r.fits else "does not fit" if r.over_bytes else "does not compile"
    verdict = f"compiles and {verdict}" if r.compiles and r.fits else verdict
    rows: Rows = [("compiler", r.reason)] if r.reason else []
    if r.settings.get("compiler_options"):
        rows.append(("compiler options", r.settings["compiler_options"]))
    if r.memory:
        over = f", over by {r.over_bytes / GIB:.2f} GiB" if r.over_bytes else ""
        said = {"parameters": "weights", "optimizer_state": "", "inputs": "cache and inputs"} if r.decode else {}
        named = {said.get(name, name.replace("_", " ")): size for name, size in r.memory.items()}
        rows.append(("memory per device", r.memory_text + over))
        rows.append(("", ", ".join(f"{name} {size / GIB:.3f}" for name, size in named.items() if name)))
    if r.compiles:
        rows += [*work_rows(r), *prediction_rows(r), *decoding_rows(r), *source_rows(r)]
    elif r.predicted_ms is not None:
        rows += roofline_rows(r)
    rows += [("left out", left_out_text(r))] if r.left_out else []
    rows += titled_rows("assumed", r.assumed)
    rows += titled_rows("chosen", r.notes)
    rows.append(("took", f"{r.trace_seconds:.1f} s to trace, {took_text(r)}, {r.host_peak_gib:.1f} GiB of host memory"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in r.versions.items())))
    head = f"{r.topology}: {verdict} ({r.program}{f', {r.level}' if r.level else ''})"
    return "\n".join([head, *(f"  {name:<18} {text}" for name, text in rows)])


def took_text(r: Report) -> str:
    doing = "plan" if r.reason == PLANNED else "compile"
    return f"{r.compile_seconds:.1f} s to {doing}{' (kept from then)' * r.from_cache}"


def titled_rows(name: str, texts: Sequence[str]) -> Rows:
    return [("" if place else name, text) for place, text in enumerate(texts)]


def work_rows(r: Report) -> Rows:
    """FLOPs, and what is sent between devices, slices and the host."""
    model = f", {r.flops_ratio:.2f} x the model's {r.model_flops:.3g}" if r.flops_ratio else ""
    model += f", the bodies of {r.loops} loops counted once" if r.loops else ""
    rows = [("FLOPs per step", f"{r.flops * r.devices:.3g} over all devices{model}")]
    rows.append(("collectives", kinds_text(r.collectives) or "none"))
    if r.collectives:
        bound = f"at least {r.communication_lower_bound_ms:.3f} ms"
        rows.append(("communication", f"{bound} ({r.communication_label})"))
    if r.slice_transfers:
        unknown = "its speed is not published: give it with --dcn_gb_per_s"
        label = NETWORK_LABEL.format(r.network_gb_per_s) if r.network_gb_per_s else unknown
        bound = r.slice_lower_bound_ms
        rows.append(("between slices", f"a device sends {kinds_text(r.slice_transfers, 'sent_bytes')}"))
        rows.append(("", f"at least {bound:.3f} ms ({label})" if bound is not None else label))
    if r.host_transfers:
        sent = [f"{v['bytes'] / 1e6:.1f} MB {direction}" for direction, v in r.host_transfers.items()]
        bound = f"at least {r.host_transfer_ms:.3f} ms over PCIe" if r.host_transfer_ms else "its speed is unknown"
        rows.append(("host memory", f"{', '.join(sent)}: {bound}"))
    return rows


def prediction_rows(r: Report) -> Rows:
    """The predicted step, alone and with communication, and how far such predictions were from clocks."""
    rows = [*whole_step_rows(r), ("predicted step", f"{step_text(r)} ({LABEL})")]
    rows.append(("", f"the compiler's estimate {r.estimated_ms:.3f} ms, by rule {r.ruled_ms:.3f} ms"))
    if r.is_memory_bound:
        rows.append(("memory-bound", f"{HALF}; the bytes moved need {r.memory_ms:.3f} ms at it"))
    return [*rows, ("calibration" if r.calibration else "accuracy", r.calibration or ERROR)]


def roofline_rows(r: Report) -> Rows:
    """The step of a program that was planned and not compiled."""
    return [
        *whole_step_rows(r),
        ("step by roofline", f"{step_text(r)} ({ROOFLINE})"),
        ("", f"of it {r.ruled_ms:.3f} ms, {RULE}"),
        ("accuracy", plan_error(r)),
        *cost_rows(r),
    ]


def plan_error(r: Report) -> str:
    return GIVEN_PLAN_ERROR if r.settings.get("hlo") else PLAN_ERROR


def step_text(r: Report) -> str:
    rate = f", {r.predicted_per_second:,.0f} {r.unit}/s" if r.predicted_per_second and not r.decode else ""
    mfu = f", MFU {r.predicted_mfu:.1%}" if r.predicted_mfu else ""
    return f"{r.predicted_ms:.3f} ms{rate}{mfu}"


def whole_step_rows(r: Report) -> Rows:
    """The step with communication, and what a billion tokens or examples cost, or as many as the run is to see."""
    rows = []
    if r.predicted_ms_nothing_hidden > r.predicted_ms:
        both = (r.predicted_ms_all_hidden, r.predicted_ms_nothing_hidden)
        text = " to ".join(f"{ms:.3f}" for ms in both) + " ms"
        if r.predicted_per_second and not r.decode:
            rates = (r.predicted_per_second * r.predicted_ms / ms for ms in both)
            text += f", {' to '.join(f'{rate:,.0f}' for rate in rates)} {r.unit}/s"
        if mfus := [f"{mfu:.1%}" for mfu in map(r.mfu_at, both) if mfu]:
            text += f", MFU {' to '.join(mfus)}"
        rows.append(("whole step", f"{text} (communication: {ALL_HIDDEN}, to nothing hidden)"))
    if cost := cost_of_tokens(r):
        rows.append((counted(r), cost))
    return rows


def left_out_text(r: Report) -> str:
    kernels = ", ".join(f"{name} {times} times" for name, times in r.left_out.items())
    return f"kernels without a price, so the step takes longer than predicted: {kernels}"


def counted(r: Report) -> str:
    return f"{r.tokens:,.0f} {r.unit}" if r.tokens else f"a billion {r.unit}"


def cost_of_tokens(r: Report) -> str:
    """'36.3 to 38.4 chip-hours, cost 98.1 to 103.6': from all communication hidden to none; '' where nobody asks. With
    tokens the hours of the run too.

    All chips of the slice are paid for. Of examples only with a price or a number, because nobody counts them in
    billions.
    """
    if r.decode or not r.predicted_per_second or not (r.price or r.tokens or r.unit == "tokens"):
        return ""
    chips = parse_topology(r.topology).num_chips
    hours = chips * (r.tokens or 1e9) / 3600 / r.predicted_per_second
    range_of_hours = [hours * ms / r.predicted_ms for ms in (r.predicted_ms_all_hidden, r.predicted_ms_nothing_hidden)]

    def between(values: list[float]) -> str:
        return " to ".join(dict.fromkeys(f"{value:,.4g}" for value in values))

    cost = f", cost {between([one * r.price for one in range_of_hours])}" if r.price else ""
    run = f"{between([one / chips for one in range_of_hours])} hours, " if r.tokens else ""
    return f"{run}{between(range_of_hours)} chip-hours{cost}"


def decoding_rows(r: Report) -> Rows:
    """What one token costs, and what binds it; none for another step than a decoding one."""
    d = r.decode
    if not d:
        return []
    cache = f"key-value cache {d['cache_bytes'] / GIB:.3f} GiB for {d['cache_length']:,} tokens a sequence"
    texts = [f"{cache}, {d['read_bytes'] / GIB:.3f} GiB read per token and device"]
    if d["tokens"] > 1:
        step = f"a step is {d['tokens']} tokens of each row: {d['predicted_ms']:.3f} ms a token predicted"
        to = f" to {d['nothing_hidden_ms']:.3f} with communication" if r.collectives else ""
        texts.append(f"{step}{to}, {d['moved_ms']:.3f} for the bytes it moves")
    bounds = f"memory {d['memory_ms']:.3f} ms at its bandwidth, matrix unit {d['matrix_ms']:.3f} ms at its peak"
    texts.append(f"bound by the {d['bound_by']}: {bounds}")
    above = f"{d['expected_ms'] / max(d['memory_ms'], d['matrix_ms']):.2f} x that bound"
    if d["is_a_speed"]:
        rate = f"{r.predicted_per_second:,.0f} tokens/s"
        texts.append(f"expect {d['expected_ms']:.3f} ms a token of each row, {rate}: the longest time, {above}")
    else:
        slow = "this program is slow, see costliest lines, and a server would run another"
        texts.append(f"no speed: the predicted step is {above}; {slow}")
    return titled_rows("decoding", texts)


def source_rows(r: Report) -> Rows:
    """Operations without an estimate; source lines and modules that take longest; the largest results."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in r.operations_without_estimate.items())
    count = sum(r.operations_without_estimate.values())
    rows = [("without estimate", f"{count} operations{': ' + kinds if kinds else ''}")]
    if r.ruled_ms >= 0.001:
        rows.append(("", f"{r.ruled_ms:.3f} ms, {RULE}"))
    large = [
        f"{size / 1e6:9.1f} MB  {kind}, {line}{f', {module}' if module else ''}"
        for size, kind, line, module in r.largest_results
        if size >= 1e6
    ]
    return rows + cost_rows(r) + titled_rows("largest results", large[:5])


def cost_rows(r: Report) -> Rows:
    """Kinds of operation, source lines and modules that take longest."""
    rows = []
    groups = [(f"{name} ({count} modules)" if count > 1 else name, ms) for name, count, ms in r.module_groups]
    titles = (("kinds", r.costliest_operations), ("lines", r.costliest_lines), ("modules", groups))
    for title, costs in ((f"costliest {kind}", costs) for kind, costs in titles):
        rows += titled_rows(title, [f"{ms:9.3f} ms  {ms / r.predicted_ms:5.1%}  {name}" for name, ms in costs])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, aligned. rows: the names of its columns first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]


def kinds_text(transfers: dict[str, dict[str, float]], size: str = "bytes") -> str:
    """'2 all-reduce (1.5 MB)'. size: the name of their bytes."""
    return ", ".join(f"{int(v['count'])} {kind} ({v[size] / 1e6:.1f} MB)" for kind, v in transfers.items())


def format_table(reports: Sequence[Report]) -> str:
    """Several slices side by side, as a Markdown table."""
    unit, levels = reports[0].unit, any(r.level for r in reports)
    header = ["slice", *(["level"] if levels else []), "devices", "fits", "GiB of limit", "FLOPs / model"]
    header += ["collectives MB", "predicted ms", "with comm. ms", f"{unit}/s", "MFU", "no estimate"]
    header += ["plan s" if all(r.reason == PLANNED for r in reports) else "compile s"]
    rows = [header]
    for r in reports:
        row = [r.topology, *([r.level] if levels else []), str(r.devices), "yes" if r.fits else "no"]
        row.append(f"{r.peak_bytes / GIB:.2f} of {r.limit_bytes / GIB:.2f}" if r.peak_bytes else "-")
        if r.predicted_ms:
            row += [f"{r.flops_ratio:.2f}" if r.flops_ratio else "-"]
            row += [f"{sum(v['bytes'] for v in r.collectives.values()) / 1e6:.1f}"]
            row += [f"{r.predicted_ms:.2f}", communication_range(r)]
            row += [f"{r.predicted_per_second:,.0f}" if r.predicted_per_second else "-"]
            row += [f"{r.predicted_mfu:.1%}" if r.predicted_mfu else "-"]
            row += [str(sum(r.operations_without_estimate.values()))]
        else:
            row += ["-"] * 7
        rows.append([*row, f"{r.compile_seconds:.0f}"])
    lines = markdown(rows)
    lines += [f"{r.topology}{f' {r.level}' if levels else ''}: {r.reason}" for r in reports if r.reason]
    for r in reports:
        sent = r.sent_bytes / 1e6
        bound = r.slice_lower_bound_ms
        at_least = "" if bound is None else f", at least {bound:.2f} ms ({NETWORK_LABEL.format(r.network_gb_per_s)})"
        lines += [f"{r.topology}: between slices a device sends {sent:.1f} MB{at_least}"] if sent else []
    said = [f"{r.level}: {note}" if levels else note for r in reports for note in r.notes]
    said += [f"{r.topology}: {r.calibration}" for r in reports if r.calibration]
    said += [f"{r.topology}: {counted(r)}: {cost}" for r in reports if r.predicted_ms and (cost := cost_of_tokens(r))]
    return "\n".join([*lines, *dict.fromkeys(said), *legend(reports)])


def communication_range(r: Report) -> str:
    """Milliseconds of a step with communication, from all hidden that the schedule can hide to nothing hidden."""
    if r.predicted_ms_nothing_hidden == r.predicted_ms:
        return "-"
    return f"{r.predicted_ms_all_hidden:.2f} to {r.predicted_ms_nothing_hidden:.2f}"


def legend(reports: Sequence[Report]) -> list[str]:
    """What stands below a table: what its milliseconds are, and how far they were from clocks."""
    label = LABEL if any(r.compiles for r in reports) else ROOFLINE
    lines = [f"predicted, rate, MFU: {label}."]
    bound = f"; {COMMUNICATION_LABEL}" if label == LABEL else ""
    lines += [f"with comm.: from {ALL_HIDDEN} to nothing hidden{bound}."]
    memory = [r.topology for r in reports if r.compiles and r.is_memory_bound]
    lines += [f"memory-bound: {', '.join(dict.fromkeys(memory))}; {HALF}."] if memory else []
    lines += [f"left out: {left_out_text(r)}." for r in reports if r.left_out]
    lines += [f"accuracy: {plan_error(r)}." for r in reports if r.reason == PLANNED]
    lines += [f"accuracy: {ERROR}."] if any(r.compiles and not r.calibration for r in reports) else []
    return list(dict.fromkeys(lines))


def format_compilers(reports: Sequence[Report]) -> str:
    """What several compilers say of one program for one slice, side by side, as a Markdown table. Empty for none."""
    if not reports:
        return ""
    levels = len({r.level for r in reports}) > 1
    heads = [f"libtpu {r.versions.get('libtpu', '?')}, jax {r.versions.get('jax', '?')}" for r in reports]
    heads = [f"{head}, {r.level}" if levels else head for head, r in zip(heads, reports, strict=True)]
    rows = [[reports[0].topology, *heads]]
    rows += [["fits", *("yes" if r.fits else f"no: {r.reason}" for r in reports)]]
    rows += [["GiB of limit", *(f"{r.peak_bytes / GIB:.2f} of {r.limit_bytes / GIB:.2f}" for r in reports)]]
    for part in dict.fromkeys(name for r in reports for name in r.memory):
        rows += [[f"  {part.replace('_', ' ')}", *(f"{r.memory.get(part, 0) / GIB:.3f}" for r in reports)]]
    for name, text in (
        ("FLOPs / model", lambda r: f"{r.flops_ratio:.2f}" if r.flops_ratio else "-"),
        ("predicted ms", lambda r: f"{r.predicted_ms:.3f}"),
        ("  estimate", lambda r: f"{r.estimated_ms:.3f}"),
        ("  by rule", lambda r: f"{r.ruled_ms:.3f}"),
        ("with comm. ms", communication_range),
        (f"{reports[0].unit}/s", lambda r: f"{r.predicted_per_second:,.0f}" if r.predicted_per_second else "-"),
        ("MFU", lambda r: f"{r.predicted_mfu:.1%}" if r.predicted_mfu else "-"),
        ("no estimate", lambda r: str(sum(r.operations_without_estimate.values()))),
        ("collectives", lambda r: kinds_text(r.collectives) or "none"),
        ("between slices", lambda r: kinds_text(r.slice_transfers) or "none"),
        ("took", took_text),
    ):
        rows += [[name, *(text(r) if r.predicted_ms else "-" for r in reports)]]
    said = [f"{r.level}: {note}" if levels else note for r in reports for note in r.notes]
    said += [f"libtpu {r.versions.get('libtpu', '?')}: {r.calibration}" for r in reports if r.calibration]
    return "\n".join([*markdown(rows), *dict.fromkeys(said), *legend(reports)])
