"""The search: which setting to try next, when, and for how long.

The speed of a shared drive can change threefold within minutes. So the control, DeepSpeed's
defaults, runs again after every few trials, and every result is judged by its ratio to the control
at that moment.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from nvme_offload.hardware.profile import PHASES, Setting

from .space import coarse, neighbours, preference, spread
from .steady import jumped
from .verdict import Evidence, Observation, PlannedTrial, Result

GROUP = 4  # trials of other settings between two runs of the control
MIN_WINDOW_SECONDS = 0.1  # or a hundredth of the budget, where that is less
MAX_WINDOW_SECONDS = 2.0
MIXED_WINDOWS = 2  # mixed speed weighs most and varies most, so its windows are longer
FINAL_WINDOW_SECONDS = 0.6  # at least, if time allows: shorter trials do not count as final
FINAL_ROUNDS = 8  # the rounds to divide the time by, for longer windows
LEAST_FINAL_ROUNDS = 2
# (rounds, finalists): the finals take the first pair for which there is time
_FINAL_PLANS = ((4, 6), (4, 4), (4, 3), (4, 2), (3, 2), (2, 2), (2, 1))
MOST_TOLERANCE = 0.15  # one short trial of a preferred setting may be so much too slow
REPEAT_SHARE = 0.15  # of the time, to repeat trials around which the control jumped

_Entry = tuple[Setting, tuple[str, ...]]  # a setting, and the phases to try it under


class Search:
    """Tries a coarse grid in short trials; then twice replaces the worse half with neighbours of
    the better half; then runs the finalists and the control, interleaved. Settings that
    `preference` puts first are kept if noise may hide that they are as fast. *seconds*: from the
    first trial on.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        control: Setting,
        seconds: float,
        clock: Callable[[], float],
        ceiling_bytes_per_second: float | None = None,
    ) -> None:
        self.evidence = Evidence(control)
        self.seconds = seconds
        self._settings = [setting for setting in settings if setting != control]
        self._clock = clock
        self._ceiling = ceiling_bytes_per_second or math.inf
        self._order = random.Random(0)
        self._start = clock()
        self._least_window = min(MIN_WINDOW_SECONDS, max(0.03, seconds / 100))
        self._repeat_seconds = REPEAT_SHARE * seconds

    def seconds_left(self) -> float:
        """Of the budget; never below 0."""
        return max(0.0, self._start + self.seconds - self._clock())

    def best_so_far(self) -> tuple[Setting, float] | None:
        """The setting with the shortest training step so far, and its gain over the control."""
        costs = self.evidence.step_seconds()
        if len(costs) < 2:
            return None
        best = min(costs, key=lambda setting: costs[setting])
        return best, costs[self.evidence.control] / costs[best] - 1

    def run(self, measure: Callable[[PlannedTrial], Result]) -> None:
        """Run the trials by *measure*."""
        self._measure = measure
        least = {phase: self._least_window * _windows(phase) for phase in PHASES}
        self._controls("screen", PHASES, least)
        self._screen(end=0.30)
        for keep, end in ((6, 0.42), (4, 0.50)):
            room = self._affordable(end)
            if room >= 4:
                chosen = self._survivors(min(keep, room // 2), MOST_TOLERANCE)
                chosen += self._newcomers(chosen, min(room - len(chosen), len(chosen) + 2))
                self._stage("narrow", [(setting, ("mixed",)) for setting in chosen], end)
        self._finals()

    def _screen(self, end: float) -> None:
        """The coarse grid, or all settings if time allows; a third of it also under reads and
        writes alone.
        """
        plenty = self._affordable(end) >= 3 * len(self._settings)
        first = self._settings if plenty else coarse(self._settings)
        preferred = min(first, key=preference)
        first = [*spread(first, max(3, self._affordable(end))), preferred]
        first = list(dict.fromkeys(first))
        alone = spread(first, len(first) // 3)
        entries = [(setting, PHASES if setting in alone else ("mixed",)) for setting in first]
        self._stage("screen", entries, end)

    def _finals(self) -> None:
        """The finalists and the control, mixed in every round, read and write in every other one."""
        left = self.seconds_left()
        most = 2 if self.seconds < 9 else 4 if self.seconds < 90 else 6
        each = FINAL_WINDOW_SECONDS + self._overhead_seconds()
        # two more for the control before the first round
        fitting = [
            (rounds, count)
            for rounds, count in _FINAL_PLANS
            if count <= most and (2 * rounds * (count + 1) + 2) * each <= left
        ]
        rounds, count = fitting[0] if fitting else (LEAST_FINAL_ROUNDS, 2)
        finalists = self._survivors(count)
        if not finalists:
            return
        trials = 2 * (len(finalists) + 1)
        window = self._clamped(
            (left / FINAL_ROUNDS - trials * self._overhead_seconds())
            / (trials + (MIXED_WINDOWS - 1) * (len(finalists) + 1))
        )
        windows = {phase: window * _windows(phase) for phase in PHASES}
        if fitting:
            windows = {phase: max(FINAL_WINDOW_SECONDS, one) for phase, one in windows.items()}
        self._controls("final", ("read", "write"), windows)
        done = 0
        while (
            done < LEAST_FINAL_ROUNDS
            or (done < rounds and self.seconds_left() > 0)
            or self.seconds_left() > 0.6 * left / done
        ):
            entries: list[_Entry] = [
                (setting, ("mixed", ("read", "write")[done % 2])) for setting in finalists
            ]
            self._order.shuffle(entries)
            self._group("final", entries, windows)
            done += 1

    def _stage(self, stage: str, entries: Sequence[_Entry], end: float) -> None:
        """Try each of *entries* once, in the time until the share *end* of the budget."""
        groups = -(-len(entries) // GROUP)
        trials = [phase for _, phases in entries for phase in phases]
        trials += [phase for phase in PHASES if phase in trials] * groups
        left = self._left_until(end) - len(trials) * self._overhead_seconds()
        window = self._clamped(left / max(1, sum(map(_windows, trials))))
        order = list(entries)
        self._order.shuffle(order)
        windows = {phase: window * _windows(phase) for phase in PHASES}
        for index in range(groups):
            self._group(stage, order[index::groups], windows)

    def _group(
        self,
        stage: str,
        entries: Sequence[_Entry],
        windows: Mapping[str, float],
        repeated: bool = False,
    ) -> None:
        """Try *entries*, then the control; once more if the drive's speed jumped meanwhile."""
        before = self._latest_control_speeds()
        first = len(self.evidence.observations)
        began = self._clock()
        for setting, phases in entries:
            for phase in phases:
                self._try(setting, phase, windows[phase], stage)
        tried = [phase for phase in PHASES if any(phase in phases for _, phases in entries)]
        self._controls(stage, tried, windows)
        after = self._latest_control_speeds()
        drifted = [
            phase for phase in tried if phase in before and jumped(before[phase], after[phase])
        ]
        seconds = self._clock() - began
        if not drifted or repeated or seconds > min(self._repeat_seconds, self.seconds_left()):
            return
        self._repeat_seconds -= seconds
        for seen in self.evidence.observations[first:]:
            if seen.phase in drifted and not seen.control and not seen.flaw:
                seen.flaw = "drifted"
        again = [(setting, tuple(p for p in phases if p in drifted)) for setting, phases in entries]
        self._group(stage, again, windows, repeated=True)

    def _controls(self, stage: str, phases: Iterable[str], windows: Mapping[str, float]) -> None:
        for phase in phases:
            self._try(self.evidence.control, phase, windows[phase], stage)

    def _try(self, setting: Setting, phase: str, seconds: float, stage: str) -> None:
        planned = PlannedTrial(setting, phase, seconds, stage, setting == self.evidence.control)
        started = self._clock() - self._start
        result = self._measure(planned)
        ended = self._clock() - self._start
        seen = Observation(
            **vars(planned), result=result, started_seconds=started, ended_seconds=ended
        )
        if max(result.read_bytes, result.write_bytes) > self._ceiling * result.seconds:
            seen.flaw = "impossible"
        self.evidence.observations.append(seen)

    def _survivors(self, keep: int, tolerance: float | None = None) -> list[Setting]:
        """Alternately the best, and the preferred within *tolerance* of it, by default the noise."""
        costs = self.evidence.step_seconds()
        costs.pop(self.evidence.control, None)
        by_speed = sorted(costs, key=lambda setting: costs[setting])
        if not by_speed:
            return []
        if tolerance is None:
            tolerance = min(MOST_TOLERANCE, max(0.03, 1.5 * self.evidence.noise("mixed")))
        most = costs[by_speed[0]] * (1 + tolerance)
        by_preference = sorted((one for one in by_speed if costs[one] <= most), key=preference)
        kept: list[Setting] = []
        for pair in zip(by_speed, by_preference + by_speed, strict=False):
            kept += [setting for setting in dict.fromkeys(pair) if setting not in kept]
        return kept[:keep]

    def _newcomers(self, survivors: Sequence[Setting], count: int) -> list[Setting]:
        """New settings: alternately the cheapest and the dearest untried neighbours of *survivors*."""
        tried = {seen.setting for seen in self.evidence.observations}
        queues = [
            [other for other in neighbours(setting, self._settings) if other not in tried]
            for setting in survivors
        ]
        found: dict[Setting, None] = {}
        end = 0
        while any(queues):
            found.update(dict.fromkeys(queue.pop(end) for queue in queues if queue))
            end = -1 - end
        return list(found)[: max(0, count)]

    def _affordable(self, end: float) -> int:
        """The number of settings that can be tried under the mixed load until *end*."""
        each = (self._least_window * MIXED_WINDOWS + self._overhead_seconds()) * (1 + 1 / GROUP)
        return max(0, int(self._left_until(end) / each))

    def _left_until(self, end: float) -> float:
        return self._start + end * self.seconds - self._clock()

    def _overhead_seconds(self) -> float:
        """The time of a trial outside its window, to fill and drain the queues and to read back."""
        taken = [
            seen.ended_seconds - seen.started_seconds - seen.seconds
            for seen in self.evidence.observations[-12:]
        ]
        return max(0.0, statistics.median(taken)) if taken else 0.1

    def _clamped(self, window: float) -> float:
        return min(MAX_WINDOW_SECONDS, max(self._least_window, window))

    def _latest_control_speeds(self) -> dict[str, float]:
        series = {phase: self.evidence.control_series(phase) for phase in PHASES}
        return {phase: points[-1][1] for phase, points in series.items() if points}


def _windows(phase: str) -> int:
    return MIXED_WINDOWS if phase == "mixed" else 1
