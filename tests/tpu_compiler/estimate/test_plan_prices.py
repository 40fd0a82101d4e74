"""The price of a planned program: FLOPs of its products, bytes of the rest, and nothing for what is on the way."""

import pytest

from tpu_compiler.compile.planned import allocated_bytes
from tpu_compiler.estimate.plan_prices import (
    MATRIX_SHARE,
    MEMORY_SHARE,
    corner_share,
    link_share,
    product_flops,
    with_prices,
)
from tpu_compiler.estimate.reading import parse_program, read_cycles, read_operations, scheduled
from tpu_compiler.estimate.schedule import exposed_ms
from tpu_utils.base.hardware import parse_topology

V6E = parse_topology("v6e-8")
BATCHED = "window={size=32x2 stride=31x1 lhs_dilate=32x2}, dim_labels=0b1f_0o1i->01bf"


@pytest.mark.parametrize(
    "left, right, out, how, multiplications",
    [
        ("128,3136", "3136,64", "128,64", "dim_labels=bf_io->bf", 128 * 3136 * 64),
        ("3136,128", "3136,64", "128,64", "dim_labels=fb_io->bf", 128 * 3136 * 64),
        # 28 places and a window of 3 that twice looks over the edge
        ("8,5,28,28", "7,5,3,3", "8,7,28,28", "window={size=3x3 pad=1_1x1_1}, dim_labels=bf01_oi01->bf01", 280 * 82**2),
        # 64 products of 16 x 24 by 24 x 48, as the TPU compiler writes them: windows over the batch
        ("32,16,2,24", "32,48,2,24", "32,2,16,48", BATCHED, 64 * 16 * 24 * 48),
    ],
)
def test_flops_of_a_product(left, right, out, how, multiplications):
    text = f"""
%inside (a: f32[{left}], b: f32[{right}]) -> f32[{out}] {{
  %a = f32[{left}]{{1,0}} parameter(0)
  %b = f32[{right}]{{1,0}} parameter(1)
  ROOT %c = f32[{out}]{{1,0}} convolution(%a, %b), {how}
}}

ENTRY %main (x: f32[{left}], y: f32[{right}]) -> f32[{out}] {{
  %x = f32[{left}]{{1,0}} parameter(0)
  %y = f32[{right}]{{1,0}} parameter(1)
  ROOT %z = f32[{out}]{{1,0}} fusion(%x, %y), kind=kOutput, calls=%inside
}}
"""
    program = parse_program(text)
    ((*_, operations),) = scheduled(program)
    types = {operation.name: operation.type for operation in operations}
    assert product_flops(operations[-1], types, program) == 2 * multiplications


PLANNED = """
%layer (a: bf16[4,1024,4096], n: s32[], x: bf16[1024,1024]) -> bf16[1024,4096] {
  %a = bf16[4,1024,4096]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %x = bf16[1024,1024]{1,0} parameter(2)
  %row = bf16[1024,4096]{1,0} fusion(%a, %n), kind=kLoop, calls=%pick
  ROOT %c = bf16[1024,4096]{1,0} convolution(%x, %row), dim_labels=bf_io->bf
}

%pick (a: bf16[4,1024,4096], n: s32[]) -> bf16[1024,4096] {
  %a.1 = bf16[4,1024,4096]{2,1,0} parameter(0)
  %n.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,1024,4096]{2,1,0} dynamic-slice(%a.1, %n.1, %zero, %zero), dynamic_slice_sizes={1,1024,4096}
}

%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %add = f32[] add(%p, %q)
}

%big (v: bf16[65536,4096]) -> bf16[65536,4096] {
  %v = bf16[65536,4096]{1,0} parameter(0)
  ROOT %n2 = bf16[65536,4096]{1,0} negate(%v)
}

ENTRY %main (w: bf16[4,1024,4096], i: s32[], x: bf16[1024,1024], v: bf16[65536,4096]) -> bf16[65536,4096] {
  %w = bf16[4,1024,4096]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x.1 = bf16[1024,1024]{1,0} parameter(2)
  %v.1 = bf16[65536,4096]{1,0} parameter(3)
  %product = bf16[1024,4096]{1,0} fusion(%w, %i, %x.1), kind=kOutput, calls=%layer
  %gathered = f32[1024]{0} all-reduce(%g), channel_id=1, replica_groups={{0,1}}, to_apply=%sum
  ROOT %negative = bf16[65536,4096]{1,0} fusion(%v.1), kind=kLoop, calls=%big
}
"""


def test_products_by_the_matrix_unit_and_the_rest_by_memory():
    """One layer's weights are read of a stack of four, through a fusion in the fusion."""
    program = parse_program(with_prices(PLANNED, V6E))
    priced = {o.name: o.cycles for o in program["ENTRY"] if o.cycles}
    ghz, hardware = V6E.hardware.clock_ghz, V6E.hardware
    product = 2 * 1024 * 1024 * 4096 / (hardware.bf16_tflops * 1e12 * MATRIX_SHARE)
    moved = 2 * 2 * 65536 * 4096 / (hardware.memory_gb_per_s * 1e9 * MEMORY_SHARE)
    read = (1024 * 4096 + 1024 * 1024 + 1024 * 4096) * 2 / (hardware.memory_gb_per_s * 1e9 * MEMORY_SHARE)
    expected = {"product": max(product, read), "negative": moved}
    assert priced == pytest.approx({name: seconds * ghz * 1e9 for name, seconds in expected.items()}, rel=1e-3)
    assert sum(read_cycles(program)[0].values()) == sum(priced.values())  # what runs between devices has no price


WINDOWED = """
%round (p: (bf16[1024,1024], bf16[1024,4096], u32[])) -> (bf16[1024,1024], bf16[1024,4096], u32[]) {
  %p = (bf16[1024,1024]{1,0}, bf16[1024,4096]{1,0}, u32[]) parameter(0)
  %x = bf16[1024,1024]{1,0} get-tuple-element(%p), index=0
  %w = bf16[1024,4096]{1,0} get-tuple-element(%p), index=1
  %i = u32[] get-tuple-element(%p), index=2
  %step = u32[] constant(STEP)
  %first = bf16[1024,4096]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  %next = u32[] add(%i, %step)
  ROOT %out = (bf16[1024,1024]{1,0}, bf16[1024,4096]{1,0}, u32[]) tuple(%x, %first, /*index=2*/%next)
}

%more (q: (bf16[1024,1024], bf16[1024,4096], u32[])) -> pred[] {
  %q = (bf16[1024,1024]{1,0}, bf16[1024,4096]{1,0}, u32[]) parameter(0)
  %bound = u32[] constant(4)
  %j = u32[] get-tuple-element(%q), index=2
  ROOT %less = pred[] compare(%j, %bound), direction=LT
}

ENTRY %main (a: (bf16[1024,1024], bf16[1024,4096], u32[])) -> (bf16[1024,1024], bf16[1024,4096], u32[]) {
  %a = (bf16[1024,1024]{1,0}, bf16[1024,4096]{1,0}, u32[]) parameter(0)
  ROOT %loop = (bf16[1024,1024]{1,0}, bf16[1024,4096]{1,0}, u32[]) while(%a), condition=%more, body=%round
}
"""


@pytest.mark.parametrize("step, trips", [(1, 4), (2, 2), (3, 2)])
def test_a_loop_whose_body_is_two_rounds_runs_half_as_often(step, trips):
    """A windowed einsum of 8 devices: its products counted twice, and collective matmul as three times too costly."""
    program = parse_program(with_prices(WINDOWED.replace("STEP", str(step)), V6E))
    product = 2 * 1024 * 1024 * 4096 / (V6E.hardware.bf16_tflops * 1e12 * MATRIX_SHARE)
    read = (1024 * 4096 + 1024 * 1024 + 1024 * 4096) * 2 / (V6E.hardware.memory_gb_per_s * 1e9 * MEMORY_SHARE)
    seconds = sum(read_cycles(program)[0].values()) / V6E.hardware.clock_ghz / 1e9
    assert seconds == pytest.approx(trips * max(product, read), rel=1e-3)


AHEAD = """
%ahead (w: bf16[4096,4096]) -> bf16[1024,4096] {
  %w = bf16[4096,4096]{1,0} parameter(0)
  ROOT %piece = bf16[1024,4096]{1,0:S(1)} slice(%w), slice={[0:1024], [0:4096]}
}

%all-reduce-scatter.1 (g: bf16[4096,4096]) -> bf16[512,4096] {
  %g = bf16[4096,4096]{1,0} parameter(0)
  %sum = bf16[4096,4096]{1,0} all-reduce(%g), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %mine = u32[] partition-id()
  ROOT %rows = bf16[512,4096]{1,0} dynamic-slice(%sum, %mine, %mine), dynamic_slice_sizes={512,4096}
}

ENTRY %main (a: bf16[4096,4096]) -> bf16[512,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %begin = ((bf16[4096,4096]{1,0}), bf16[1024,4096]{1,0:S(1)}, u32[]) async-start(%a), calls=%ahead
  WORK
  %there = bf16[1024,4096]{1,0:S(1)} async-done(%begin)
  ROOT %scattered = bf16[512,4096]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_is_read_ahead_waits_for_memory_alone():
    """A slice that an asynchronous computation brings on the chip once cost as if all waited for it; free, a step that
    memory bounds took 0.19 ms by plan and 0.32 compiled."""

    def milliseconds(work):
        program = parse_program(with_prices(AHEAD.replace("WORK", work), V6E))
        return sum(read_cycles(program)[0].values()) / V6E.hardware.clock_ghz / 1e6

    read = 1024 * 4096 * 2 / (V6E.hardware.memory_gb_per_s * 1e9 * MEMORY_SHARE) * 1e3
    product = 2 * 4096**3 / (V6E.hardware.bf16_tflops * 1e12 * MATRIX_SHARE) * 1e3
    assert milliseconds("") == pytest.approx(read, rel=1e-3)
    work = "%p = bf16[4096,4096]{1,0} convolution(%a, %a), dim_labels=bf_io->bf"
    assert milliseconds(work) == pytest.approx(product, rel=1e-3)


def test_a_reduce_scatter_takes_what_an_all_reduce_takes():
    program = parse_program(with_prices(AHEAD.replace("WORK", ""), V6E))
    reduced = 2 * 7 / 8 * 4096 * 4096 * 2 / (corner_share(V6E) * V6E.hardware.link_gb_per_s * 1e9)
    assert exposed_ms(program, V6E, 8, link_share) == pytest.approx(reduced * 1e3)
    assert exposed_ms(program, V6E, 8) == pytest.approx(reduced * 1e3 / 4), "a compiled step: the least there is"


ON_SPARSE_CORE = """
%called (g: bf16[8192,8192]) -> bf16[1024,8192] {
  %g = bf16[8192,8192]{1,0} parameter(0)
  ROOT %rows = bf16[1024,8192]{1,0} reduce-scatter(%g), channel_id=1, replica_groups=[1,8]<=[8], BY
}, execution_thread="sparsecore"
%meanwhile (g: bf16[8192,8192]) -> bf16[1024,8192] {
  %g = bf16[8192,8192]{1,0} parameter(0)
  ROOT %call = bf16[1024,8192]{1,0} call(%g), to_apply=%called
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[8192,8192]) -> bf16[1024,8192] {
  %a = bf16[8192,8192]{1,0} parameter(0)
  %begin = ((bf16[8192,8192]{1,0}), bf16[1024,8192]{1,0}, u32[]) async-start(%a), calls=%meanwhile
  %p = bf16[8192,8192]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
  ROOT %there = bf16[1024,8192]{1,0} async-done(%begin)
}
""".replace("BY", 'to_apply=%add, backend_config={"device_type":"DEVICE_TYPE_SPARSECORE"}')


def test_a_sparse_core_reduces_beside_products_at_half_the_rate():
    """v6e's is handed the collective by a call, and was once taken to keep the step waiting."""
    program = parse_program(with_prices(ON_SPARSE_CORE, V6E))
    reduced = 7 / 8 * 8192 * 8192 * 2 / (link_share("reduce-scatter", V6E, True) * V6E.hardware.link_gb_per_s * 1e9)
    product = 2 * 8192**3 / (V6E.hardware.bf16_tflops * 1e12 * MATRIX_SHARE)
    assert link_share("reduce-scatter", V6E, True) == corner_share(V6E) / 4 and reduced > product
    assert exposed_ms(program, V6E, 8, link_share) == pytest.approx((reduced - product) * 1e3, rel=1e-3)


@pytest.mark.parametrize(
    "path", ["jit(step)/short", "jit(step)/" + "a_long_scope/" * 9 + "dot", "jit(step)/" + "x" * 99]
)
def test_a_kind_of_operation_begins_with_a_whole_name(path):
    line = (
        f'  ROOT %n = f32[8]{{0}} negate(%a), metadata={{op_name="{path}"}}, backend_config={{"estimated_cycles":"5"}}'
    )
    text = "\n".join(["ENTRY %main (a: f32[8]) -> f32[8] {", "  %a = f32[8]{0} parameter(0)", line, "}"])
    ((kind, _),) = read_operations(parse_program(text), 1.0)
    said = kind.removeprefix("negate f32[8], ")
    assert len(said) <= 80 and (path == said or path.endswith("/" + said) or "/" not in path[-80:])


def test_a_corner_has_fewer_links():
    shares = {
        "v6e-1": 1.0,
        "v6e-4": 0.5,
        "v6e-8": 0.5,
        "v6e-256": 1.0,
        "v5e:8x16": 0.75,
        "v5p-8": 2 / 6,
        "v5p-128": 1.0,
    }
    assert {name: corner_share(parse_topology(name)) for name in shares} == shares


def test_a_plans_allocations_are_those_of_main_memory():
    """libtpu 0.0.52 lists what a fusion for the SparseCore is given once more: logits, three times 7 GiB."""
    listed = [
        "size 4096, page 0, parameter 3, shape |bf16[36,512]| at ShapeIndex {}, maybe-live-out:",
        "size 1024, page 0, maybe-live-out:",
        "size 512, page 0, color 1, parameter 4, shape |s32[]|:",
        "size 7467958272, page 0, thread-local:",
        "size 8192, page 0, preallocated-temp:",
    ]
    plan = "".join(f"allocation {n}: {line}\n value: <1 x @0> (size=1,offset=0)\n" for n, line in enumerate(listed))
    sizes = dict(peak_bytes=13312, argument_bytes=4096, output_bytes=1024, temporary_bytes=8192)
    assert allocated_bytes(plan) == sizes
