"""The benchmarks, and the harness that they share.

Plan    what is compared: cases (what there is to do) x sides (who does it). From a plan file
        (`plan.py`) or from options (`command.py`). Frozen: a run changes no plan.
Turns   `turns.py`. Every round has each side once, one after the other, and the next round goes in
        another order (A B, B A): a drive's speed drifts more within minutes than sides differ. No
        round begins that would pass `--seconds`; an interrupt ends the rounds, and what was
        measured by then is reported.
Sides   `apart.py`. A side that trains is a fresh process that gets its job as JSON, tells its
        events as lines of JSON, and is ended when it takes too long. What a side that fails told
        before is kept, with the reason. The first steps of a side warm up and do not count.
Meters  `meter.py`: what a stretch of a process takes of time, CPU, drive and memory. `floor.py`:
        what the drive gives at best, measured by fio between the runs.
Results records: one for each run of a side, with its round, side and error, kept as JSON and
        grouped as a `pandas.DataFrame`.
Report  `report.py`: facts of the machine, date and command (`machine.py`), then tables. A ratio is
        always the median over the rounds of what one round gave, shown with its spread; never a
        quotient of two medians. A report is a function of the results alone.
"""
