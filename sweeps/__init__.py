"""The benchmarks and their common harness.

| benchmark | measures |
|---|---|
| `systems` | models of 1 to 70 B by this package, DeepSpeed, FSDP2 and others, on one GPU or several |
| `inference` | a model of 1 to 70 B from the drive, compared with accelerate: tokens, and loading |
| `training` | ZeRO-3 and plain PyTorch with their bits, bytes and the drive's floor, by phase of a step |
| `formats` | losses of state formats, by seed |
| `activations` | ways to keep activations: time and memory |
| `compare` | the engine and checkpoints, compared with other libraries (`peers`) |
| `outside` | no speed: training programs of other projects, compared with their plain runs |

Plan    Cases (the work) x sides (the systems compared), from a plan file (`plan.py`) or from
        options (`command.py`). A run never changes its plan.
Turns   `turns.py`. Every round runs each side once, and the next round reverses the order (A B,
        B A): a drive's speed drifts more within minutes than sides differ. No round starts that
        would exceed `--seconds`. An interrupt ends the rounds, and the report has all finished runs.
Sides   `apart.py`. A side that trains is a separate process that receives its job as JSON, reports
        events as lines of JSON, and is ended after a time limit. The events of a side that fails
        are kept, with the reason. The first steps of a side are warm-up.
Meters  `meter.py`: time, CPU, drive traffic and memory of a part of a process. The drive's floor
        is from fio, which runs between the sides (`floor.py`).
Results Records, one per run of a side, with its round, side and error, kept as JSON and grouped as
        a `pandas.DataFrame`.
Report  `report.py`: facts of the machine, date and command (`machine.py`), then tables. A ratio is
        the median over the rounds of the ratio within one round, with its spread, never a quotient
        of two medians. A report is a function of the results alone.
"""
