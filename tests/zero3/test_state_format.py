"""The key "state_format" of ZeRO-3: "split" is DeepSpeed with parameters rounded half away from
zero, to the bit; "compact" repeats, and resumes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpointing import Life
from launch import Case, differences, train
from test_checkpoint import run as run_lives

SPLIT = {"state_format": "split"}
COMPACT = {"state_format": "compact"}
SMALLEST = {"host_memory": "smallest"}

SPLIT_CASES = {
    "streamed": Case(
        model="blocks",
        accumulation=2,
        clipping=0.5,
        groups=2,
        steps=4,
        section={**SPLIT, **SMALLEST},
    ),
    "both-on-the-drive": Case(
        model="blocks", parameters="nvme", evaluate=True, steps=4, section={**SPLIT, **SMALLEST}
    ),
    "parameters-in-memory": Case(
        model="embedding", parameters="cpu", section={**SPLIT, **SMALLEST}
    ),
    "zero-init": Case(
        model="tied",
        parameters="nvme",
        zero_init=True,
        persistence=100,
        section={**SPLIT, **SMALLEST},
    ),
    "no-states": Case(optimizer="sgd", section=SPLIT),
    "initialized-states": Case(optimizer="adagrad", section=SPLIT),
    "states-of-every-kind": Case(
        optimizer="sign", model="blocks", steps=4, section={**SPLIT, "host_memory": "double"}
    ),
    "made-again": Case(lives=2, parameters="nvme", section=SPLIT),
}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drive")
    with ThreadPoolExecutor(2) as pool:
        mine, reference = (
            pool.submit(train, list(SPLIT_CASES.values()), directory, ours=ours)
            for ours in (True, False)
        )
        return dict(
            zip(SPLIT_CASES, zip(mine.result(), reference.result(), strict=True), strict=True)
        )


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_split_loses_nothing(split, name):
    assert differences(*split[name]) == []


@pytest.mark.slow  # compiles that Adam
@pytest.mark.processor
def test_split_loses_nothing_with_cpu_adam_of_deepspeed(cpu_adam, tmp_path):
    case = Case(optimizer="cpu_adam", section=SPLIT)
    assert differences(train([case], tmp_path)[0], train([case], tmp_path, ours=False)[0]) == []


@pytest.mark.slow
def test_split_loses_nothing_on_two_ranks(tmp_path):
    case = SPLIT_CASES["both-on-the-drive"].but(model="odd")
    assert (
        differences(
            train([case], tmp_path, ranks=2)[0], train([case], tmp_path, ranks=2, ours=False)[0]
        )
        == []
    )


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
    # so that sub-groups, and blocks with them, are the same whatever the memory
    case = Case(model="blocks", sub_group_size=1, steps=6)
    cases = [case.but(section={**COMPACT, **section}) for section in ({}, {}, SMALLEST)]
    cases += [cases[2].but(parameters="nvme"), case.but(section=SMALLEST)]
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(
            lambda half: train(half, tmp_path_factory.mktemp("drive")), (cases[:3], cases[3:])
        )
        return [result for half in halves for result in half]


@pytest.mark.slow
def test_compact_gives_the_same_bits_from_memory_and_from_the_drive(compact):
    for other in compact[1:4]:
        assert differences(other, compact[0]) == []
    assert compact[0]["traffic"]["bytes_read"] == 0
    assert compact[2]["traffic"]["bytes_read"] > 0


@pytest.mark.slow
def test_compact_trains_much_as_exact_does(compact):
    rounded, exact = (
        [float.fromhex(loss) for loss in result["losses"]] for result in (compact[0], compact[-1])
    )
    assert rounded[:1] == exact[:1]
    assert rounded != exact  # or nothing was rounded
    assert rounded == pytest.approx(exact, rel=0.1)
    assert exact[-1] < 0.9 * exact[0]


@pytest.mark.slow
def test_runs_go_on_as_if_they_had_not_ended(tmp_path):
    cases = [
        Case(name="split", model="blocks", groups=2, section={**SPLIT, "host_memory": 400_000}),
        Case(
            name="compact",
            model="blocks",
            parameters="nvme",
            zero_init=True,
            section={**COMPACT, "host_memory": 400_000},
        ),
        Case(name="adagrad", optimizer="adagrad", section=COMPACT),
        Case(
            name="compact24",
            model="blocks",
            section={"state_format": "compact24", "host_memory": 400_000},
        ),
    ]
    whole = run_lives(
        [Life(case.name, case, saves=[[2, str(tmp_path / case.name)]]) for case in cases], tmp_path
    )
    lives = [Life(case.name, case, first=2, load=str(tmp_path / case.name)) for case in cases]
    # The file equals DeepSpeed's, so that it does not tie a run to a format.
    lives += [Life("to exact", cases[0].but(section={}), first=2, load=str(tmp_path / "split"))]
    resumed = run_lives(lives, tmp_path)
    for case in cases:
        assert resumed[case.name]["end"] == whole[case.name]["end"], case.name
    assert resumed["to exact"]["begin"]["masters"] == resumed["split"]["begin"]["masters"]
    assert resumed["to exact"]["begin"]["states"] == resumed["split"]["begin"]["states"]


REFUSED = [
    (Case(dtype="fp16", section=SPLIT), 'enable "bf16", or leave "state_format" out'),
    (Case(dtype="fp32", section=COMPACT), 'enable "bf16", or leave "state_format" out'),
    (
        Case(optimizer="sign", section=COMPACT),
        "keeps float32 states; Sign has 'momentum' in torch.bfloat16",
    ),
    (
        Case(section={"state_format": "small"}),
        '"state_format" in "nvme_offload" must be one of "exact", "split", "compact", "compact24"',
    ),
    (Case(section={"state_format": "split", "swappers": "deepspeed"}), 'leave "swappers" out'),
    (Case(section={"update_device": "gpu"}), "is not possible, since there is no CUDA device"),
    (
        Case(parameters="nvme", states="cpu", section={"update_device": "gpu"}),
        "since no optimizer states of ZeRO-3 are on a drive",
    ),
]


def test_initialize_reads_no_offloaded_parameter_in_vain(tmp_path):
    formats = ["exact", "split", "compact", "compact24"]
    case = Case(model="blocks", parameters="nvme", steps=1)
    results = train([case.but(section={"state_format": name}) for name in formats], tmp_path)
    reads = [result["swapped in by initialize"] for result in results]
    # DeepSpeed gathers each parameter once, to register a hook. Only "exact" keeps whole masters.
    count = len(results[0]["weights"])
    assert reads == [2 * count, count, count, count]


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path):
    for result, (_, said) in zip(
        train([case for case, _ in REFUSED], tmp_path), REFUSED, strict=True
    ):
        assert result["error"] in ("UsageError", "UnsupportedError")
        assert said in result["message"]
