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
    "start, kind, by, compared, direction, bound, turns, known",
    [
        (0, "add", 1, "%j, %bound", "LT", 12, 12, True),
        (0, "add", 1, "%j, %bound", "LE", 12, 13, True),
        (0, "add", 5, "%j, %bound", "LT", 12, 3, True),
        (100, "add", -1, "%j, %bound", "GT", 0, 100, True),
        (100, "subtract", 3, "%j, %bound", "GE", 10, 31, True),
        (990, "add", 1, "%j, %bound", "LT", 1000, 10, True),
        (990, "add", 1, "%bound, %j", "GT", 1000, 10, True),
        (0, "add", 1, "%j, %bound", "LT", 3_000_000, 3_000_000, True),
        (1, "multiply", 2, "%j, %bound", "LT", 1024, 10, True),
        (1, "multiply", 3, "%j, %bound", "NE", 0, 1, False),
        (4, "add", 2, "%j, %bound", "NE", 10, 3, True),
        (5, "add", 1, "%j, %bound", "LT", 5, 0, True),
        (0, "add", 0, "%j, %bound", "LT", 5, 5, False),
        (0, "xor", 3, "%j, %bound", "LT", 8, 8, True),
        (0, "add", 1, "%j, %copied_in", "LT", 7, 7, False),
        (0, "add", 1, "%value, %large", "GT", 1, 1, False),
    ],
)
def test_a_loop_runs_as_often_as_its_counter_says(start, kind, by, compared, direction, bound, turns, known):
    """The largest constant of the condition was taken, a float's too, whatever the counter began with."""
    text = LOOP.replace("COMPARED", compared).replace("DIRECTION", direction).replace("KIND", kind)
    program = parse_program(text.replace("BY", str(by)).replace("BOUND", str(bound)).replace("START", str(start)))
    cycles, _ = read_cycles(program)
    assert sum(cycles.values()) == 10 * turns
    said = ["loops that end by values: 1 of 1, counted by a number in their condition, or once"]
    assert assumed(program) == (said if not known else [])


@pytest.mark.parametrize("joined, turns", [("and", 12), ("or", 50)])
def test_a_loop_with_two_conditions(joined, turns):
    """That of a status that is computed says nothing beside one of a counter."""
    more = f"""%fifty = s32[] constant(50)
  %late = pred[] compare(%j, %fifty), direction=LT
  %status = s32[] get-tuple-element(%q), index=2
  %two = s32[] constant(2)
  %going = pred[] compare(%status, %two), direction=NE
  %first = pred[] compare(%j, %bound), direction=LT
  ROOT %c = pred[] {joined}(%first, %late, %going)"""
    text = LOOP.replace("ROOT %c = pred[] compare(COMPARED), direction=DIRECTION", more)
    text = text.replace("KIND", "add").replace("BY", "1").replace("BOUND", "12").replace("START", "0")
    text = text.replace("tuple(%next, %y)", "tuple(%next, %y, %y)")
    assert sum(read_cycles(parse_program(text))[0].values()) == 10 * turns


def test_a_loop_that_goes_down_from_nobody_knows_where():
    text = LOOP.replace("COMPARED", "%j, %bound").replace("DIRECTION", "GT").replace("KIND", "add").replace("BY", "-1")
    text = text.replace("BOUND", "0").replace("START", "100")
    held = text.replace("while(%tuple)", "while(%held)").replace(
        "  ROOT %loop", "  %held = (s32[], f32[]) opt-barrier(%tuple)\n  ROOT %loop"
    )
    assert sum(read_cycles(parse_program(text))[0].values()) == 1000
    assert sum(read_cycles(parse_program(held))[0].values()) == 10 and assumed(parse_program(held))


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
    sending = parse_program(BRANCHES.replace("SECOND", "%sent").replace("estimated_cycles", "unknown"))
    for program in (unpriced, sending):
        assert len(called_by(program["ENTRY"][-1], program)) == 2, "a plan prices both"


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
