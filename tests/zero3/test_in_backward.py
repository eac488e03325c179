"""`"step_in_backward"` in ZeRO-3 changes no bits, also where parameters have no gradients, and refuses
other settings by name. `test_parity.py` compares it with stock DeepSpeed.
"""

from __future__ import annotations

from launch import Case, differences, train

IN_BACKWARD = {"step_in_backward": True}
CASES = {
    "sometimes": Case(model="sometimes", sub_group_size=2000, steps=5, accumulation=2),
    "dropped": Case(model="dropped", sub_group_size=5000, steps=6),
    "compact": Case(
        model="wide", sub_group_size=20_000, steps=4, section={"state_format": "compact"}
    ),
    "counting": Case(model="blocks", optimizer="counting", loop="count", steps=3),
}
REFUSED = {
    "clipping": (Case(clipping=1.0), 'excludes "gradient_clipping" above 0'),
    "fp16": (Case(dtype="fp16"), "excludes fp16"),
    "last": (Case(section={"missing_gradients": "last"}), 'excludes "missing_gradients": "last"'),
    "overlap": (Case(section={"overlap_step": True}), 'excludes "overlap_step"'),
    "unmanaged": (
        Case(top={"managed_gradient_accumulation": False}, zero={"overlap_comm": False}),
        'excludes "managed_gradient_accumulation": false',
    ),
    "parameters": (Case(parameters="nvme"), "does not work with parameters on a drive"),
    "gradients": (Case(fragments=True), "uses up in backward: leave it out to read"),
    "twice": (Case(loop="backward twice"), "call engine.step() after each backward pass"),
}


def in_backward(case: Case) -> Case:
    return case.but(section={**case.section, **IN_BACKWARD})


def test_bits_are_those_without(tmp_path):
    cases = list(CASES.values())
    mine = train([in_backward(case) for case in cases], tmp_path, ranks=2)
    reference = train(cases, tmp_path, ranks=2)
    for name, *results in zip(CASES, mine, reference, strict=True):
        assert differences(*results) == [], name


def test_what_it_excludes_is_refused(tmp_path):
    cases = [case for case, _ in REFUSED.values()]
    results = train([in_backward(case) for case in cases], tmp_path)
    for (_, message), result in zip(REFUSED.values(), results, strict=True):
        assert message in result.get("message", ""), result
