"""What is read from a program's text: turns of loops, branches, bytes. No compiler is asked."""

import pytest

from tpu_compiler.estimate.reading import assumed, called_by, list_collectives, parse_program, read_cycles, shape_bytes

LOOP = """
%body (p: (s32[], f32[])) -> (s32[], f32[]) {
  %p = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[] get-tuple-element(%p), index=1
  %by = s32[] constant(BY)
  %next = s32[] KIND(%i, %by)
  %y = f32[] add(%x, %x), backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[]) tuple(%next, %y)
}

%more (q: (s32[], f32[])) -> pred[] {
  %q = (s32[], f32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %value = f32[] get-tuple-element(%q), index=1
  %large = f32[] constant(1000)
  %bound = s32[] constant(BOUND)
  %early = pred[] compare(%value, %large), direction=GT
  ROOT %c = pred[] compare(COMPARED), direction=DIRECTION
}

ENTRY %main (a: f32[]) -> (s32[], f32[]) {
  %a = f32[] parameter(0)
  %start = s32[] constant(START)
  %copied = s32[] copy(%start)
  %tuple = (s32[], f32[]) tuple(%copied, %a)
  ROOT %loop = (s32[], f32[]) while(%tuple), condition=%more, body=%body
}
"""


@pytest.mark.parametrize(
    "start, kind, by, compared, direction, bound, turns",
    [
        (0, "add", 1, "%j, %bound", "LT", 12, 12),
        (100, "add", -1, "%j, %bound", "GT", 0, 100),
        (100, "subtract", 3, "%j, %bound", "GE", 10, 31),
        (990, "add", 1, "%j, %bound", "LT", 1000, 10),
        (990, "add", 1, "%bound, %j", "GT", 1000, 10),
        (1, "multiply", 2, "%j, %bound", "LT", 1024, 10),
        (4, "add", 2, "%j, %bound", "NE", 10, 3),
        (5, "add", 1, "%j, %bound", "LT", 5, 0),
        (0, "add", 0, "%j, %bound", "LT", 5, None),
        (0, "add", 1, "%j, %copied_in", "LT", 5, None),
        (0, "add", 1, "%value, %large", "GT", 5, None),
    ],
)
def test_a_loop_runs_as_often_as_its_counter_says(start, kind, by, compared, direction, bound, turns):
    """The largest constant of the condition was taken, a float's too, whatever the counter began with."""
    text = LOOP.replace("COMPARED", compared).replace("DIRECTION", direction).replace("KIND", kind)
    program = parse_program(text.replace("BY", str(by)).replace("BOUND", str(bound)).replace("START", str(start)))
    cycles, _ = read_cycles(program)
    assert sum(cycles.values()) == 10 * (1 if turns is None else turns)
    said = ["loops that end by values: 1 of 1, each counted as one turn"]
    assert assumed(program) == (said if turns is None else [])


BRANCHES = """
%short (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %s = f32[8] add(%a, %a), backend_config={"estimated_cycles":"10"}
}

%long (b: f32[8]) -> f32[8] {
  %b = f32[8] parameter(0)
  ROOT %l = f32[8] add(%b, %b), backend_config={"estimated_cycles":"90"}
}

%sent (d: f32[8192]) -> f32[8192] {
  %d = f32[8192] parameter(0)
  ROOT %r = f32[8192] all-reduce(%d), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (i: s32[], c: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %c = f32[8] parameter(1)
  ROOT %chosen = f32[8] conditional(%i, %c, %c), branch_computations={%short, SECOND}
}
"""


def test_of_a_conditional_the_longest_branch_counts():
    """All were added up."""
    program = parse_program(BRANCHES.replace("SECOND", "%long"))
    assert sum(read_cycles(program)[0].values()) == 90
    assert assumed(program) == ["conditionals: 1, of each its longest branch"]
    sending = parse_program(BRANCHES.replace("SECOND", "%sent"))
    assert [kind for _, kind, *_ in list_collectives(sending, 2)] == ["all-reduce"]
    unpriced = parse_program(BRANCHES.replace("SECOND", "%long").replace("estimated_cycles", "unknown"))
    assert len(called_by(unpriced["ENTRY"][-1], unpriced)) == 2, "a plan prices both"


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f8e4m3fn[8,4]{1,0}", 32),
        ("bf16[8,4]{1,0}", 64),
        ("c64[8,4]", 256),
        ("c128[2]", 32),
        ("s4[8,4]{1,0:T(8,128)(8,1)E(4)}", 16),
        ("s4[8,4]{1,0}", 32),
        ("pred[8]", 8),
        ("(f32[], u16[3])", 10),
    ],
)
def test_bytes_of_a_type(shape, size):
    """Those that no script here has were taken to have four."""
    assert sum(shape_bytes(shape, padded=False)) == size
