"""`NVMeOptimizer`: a `torch.optim.Optimizer` whose states are on a drive."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch

from ..errors import UnsupportedError, UsageError, known
from ..hardware.config import AioConfig
from ..io.archive import MappedFiles
from ..optimizer_states import state_format as format_called
from ..optimizer_states import wide_enough
from ..optimizer_states.tree import Key, replaced, tensors, top
from ..swap.cores import use_share_of_cores
from ..swap.tier import Tier, engine_config, memory_size
from . import parts, resharding, saved
from .accumulation import GradientSums
from .backward import BackwardUpdates, await_copy
from .binding import Binding, Plan, check_resized, may_be_replaced, parameters_of
from .bucketing import Bucketing
from .buckets import Bucket, Form, Weight, like, local
from .budget import Budget, DividedOtherwiseError
from .gradient_hooks import GradientHooks
from .host_gradient import HostGradient
from .inner import Maker, follow
from .modes import callers, fixed_modes
from .options import StepOptions, differences, materialised, same, samples_of
from .placeholders import StateOnDrive, is_on_drive
from .progress import Progress
from .provisional import Before, ProvisionalUpdates
from .shown_state import ShownState, ShownStates
from .stats import UpdateClock, UpdateStats
from .update import MASTER, Options, Updater
from .update_device import UpdateDevice
from .update_queue import BucketUpdates, Step, anything_is_compiled, can_be_awaited

_log = logging.getLogger(__name__)
_serials = itertools.count()


class NVMeOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, with its states, and the fp32 masters of 16-bit parameters, on drives.

    It is used as any `torch.optim.Optimizer`, with schedulers, hooks, parameter groups, closures,
    GradScaler, DDP, FSDP2 and tensor parallelism. A step streams the states of a few parameters at
    a time: drive, pinned memory, device of the parameters, and back. Further methods and attributes
    of *optimizer_class*, such as `train` and `eval`, are available.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters, or parameter groups, as for every optimizer. Dense tensors
        with floating-point dtypes; bfloat16 and float16 get fp32 masters.
    optimizer_class : callable
        Makes the optimizer whose states are offloaded. Its steps must depend on dense gradients
        only. torch's own classes are known. Any other class is tried when the optimizer is made,
        and a line of the log gives the result. A class that cannot update parameters separately,
        such as Prodigy, needs *host_memory* for all of its states.
    paths : path or sequence of paths
        Existing directories on the drives, over which states are striped.
    host_memory : int or str
        Pinned memory in bytes, or as text such as "8GB"; "auto" takes a share of the available
        memory. States that fit in it never touch the drive, and need no room there. The bits do not
        depend on it.
    state_format : {"exact", "split", "compact", "compact24"}
        "exact" gives bit for bit the results of *optimizer_class* in memory, over fp32 copies of
        16-bit parameters, and moves 12 bytes for each Adam parameter and direction. "split" moves
        10 if parameters are bfloat16, and is lossless too. "compact" keeps moments in 8 bits and
        moves 4; "compact24" rounds masters to 24 bits as well and moves 3.
    step_in_backward : {False, True, "local", "provisional"}
        Update parameters during `backward`, as soon as their gradients are complete, and drop the
        gradients; `step` makes the remaining updates. It excludes code that reads gradients in
        between: clipping by a norm, GradScaler, DDP. To accumulate, run all but the last `backward`
        under `no_sync`. With several processes it takes DTensors (FSDP2, tensor parallelism);
        "local" takes any parameter, and asserts that only autograd and FSDP2 work on gradients.

        "provisional" keeps gradients and the old parameters until `step`. `step` undoes the updates
        whose gradients were changed since, such as by clipping, and makes them again. The bits do
        not differ from updates after `backward`. The drive keeps old states in addition to new ones
        until then, so it needs up to twice the room. `zero_grad` without a `step` undoes all
        updates, and so does reading states. Between `backward` and `step` parameters have their new
        values; a parameter to which the program writes then, such as by loading a model, keeps the
        written values.
    overlap_step : bool
        `step` returns immediately. A thread makes its updates concurrently with later work, usually
        the forward pass, in the order in which that pass uses parameters. The bits do not change:
        the first use of a parameter waits for its update, and so do `state`, `state_dict`, `stats`
        and every method but `zero_grad`. `synchronize` lists the uses that do not wait.
    accumulate : {None, "host"}
        "host" moves each gradient to host memory as soon as `backward` has computed it, and adds to
        it there in the next `backward`. Gradients share *host_memory* with the states, and spill to
        the drive where they do not fit. The bits are the same as with accumulation in `.grad`,
        which has a placeholder. `step` uses the gradients up: call `zero_grad` before the next
        `backward`. Not together with *step_in_backward*, *overlap_step*, or DTensors.
    update_device : {"auto", "gpu", "cpu"}
        Where parameters in host memory are updated. "auto" is the GPU for parameters with which
        FSDP2 computes on a GPU (CPUOffloadPolicy), if the GPU has 1 GiB free, and the CPU for all
        others. "gpu" is the current CUDA device for all. *optimizer_class* on that device gives the
        same bits. Weights and gradients are copied to the GPU for an update, and weights back.
    elementwise : bool
        Assert that every element is updated separately, if the trial cannot detect it.
    masters : bool
        Whether 16-bit parameters have fp32 masters. Without masters the parameters are updated
        directly, bit for bit as by *optimizer_class* in memory, with states of 16 bits.
    aio : AioConfig, optional
        Settings of the engine; by default the choice of `nvme-sweep` for the first of *paths*.
    **kwargs
        Arguments of *optimizer_class*, such as ``lr``.

    Raises
    ------
    UsageError
        An argument is wrong, a directory does not exist, or *host_memory* is too small.
    UnsupportedError
        The optimizer or a parameter is of a kind that cannot be offloaded; the message says which.
    NoSpaceError
        The drives have no room for the states that do not fit in *host_memory*.

    Notes
    -----
    As in torch, a model may be sharded, moved or cast after its optimizer was made, and
    `param_groups` may get other parameters at any time. States belong to the parameter that is
    their key in `state`.

    `close` frees memory and space on the drives, and so do the end of a ``with`` and the garbage
    collection of the optimizer.

    `state` has small values, and placeholders for all others. Reading a placeholder copies its
    values; writing to it, replacing it or removing it takes effect immediately or before the next
    step. Changing a 16-bit parameter in place between steps changes its master, too.

    After a step that raised, as with an error of the drive or Ctrl-C, some parameters are updated
    and others are not. `step` with the same gradients updates only the remaining parameters;
    `zero_grad` drops the rest of that step. After an exception in the middle of a change, `step`
    raises UsageError until weights and states are loaded from a checkpoint; the same object can
    load them.
    """

    @fixed_modes()
    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        host_memory: int | str = "auto",
        state_format: Literal["exact", "split", "compact", "compact24"] = "exact",
        step_in_backward: bool | Literal["local", "provisional"] = False,
        overlap_step: bool = False,
        accumulate: Literal["host"] | None = None,
        update_device: Literal["auto", "gpu", "cpu"] = "auto",
        elementwise: bool = False,
        masters: bool = True,
        aio: AioConfig | None = None,
        **kwargs: Any,
    ) -> None:
        place_updates = UpdateDevice(update_device).of
        if step_in_backward not in (False, True, "local", "provisional"):
            raise UsageError(
                f'step_in_backward must be False, True, "local" or "provisional", not {step_in_backward!r}'
            )
        if accumulate not in (None, "host"):
            raise UsageError(f'accumulate must be None or "host", not {accumulate!r}')
        if accumulate is not None and (step_in_backward or overlap_step):
            raise UsageError(
                'accumulate="host" needs step_in_backward=False and overlap_step=False: the one leaves no gradients to accumulate, and the other keeps '
                "the gradients of a whole step on the device of the parameters"
            )
        given = materialised(params)
        self._format = dataclasses.replace(format_called(state_format), keeps_masters=bool(masters))
        self._class_name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        self._updated: set[Bucket] = set()  # buckets that the present step has updated
        self._options = StepOptions()
        self._backward = (
            BackwardUpdates(self._updated, assume_final=step_in_backward == "local")
            if step_in_backward
            else None
        )
        self._provisional: ProvisionalUpdates | None = None
        self._sums: GradientSums | None = None
        self._overlap = bool(overlap_step)
        self._queue: BucketUpdates | None = None
        self._open_step: Step | None = None  # the present step, if some of its updates are queued
        self._gradient_hooks = (
            GradientHooks(self) if step_in_backward or accumulate is not None else None
        )
        self._bound_in_task = -1  # the backward pass in which the binding was last checked
        self._hooks: dict[Weight, Any] = {}  # they detect the first gradient of a backward pass
        # the program may have changed it since it was last checked
        self._state_was_asked_for = False
        self._has_begun = False  # a backward pass has begun the present step
        self._backward_begins = True  # the next gradient is the first since the last step
        # the backward pass that waits at its end until weights are in host memory
        self._draining_task = -1
        self._uses: dict[Weight, int] = {}  # place of each parameter in the order of use
        self._late: list[tuple[int, str, Any, Any]] = []  # options that a queued step has changed
        self._told_alone = False  # the warning that overlap_step is left out was logged
        self._changes_groups = False
        self._leaves = False  # updates of this step failed in backward(); `step` makes them
        self._left = False  # the same for the previous step or this one
        self._source = weakref.ref(self)
        # `state`. This class accesses it by the methods of `dict`, which do not wait.
        self._state: dict[Any, Any] = ShownStates(_settling(self._source))
        self._broken = ""  # why parameters and states are out of sync; "" if they are not
        self._cause = ""  # the exception that ended the last call
        self._progress = Progress()  # of the program's calls
        self._job_progress = Progress()  # of the queue's thread
        # The number of a step whose updates have all been made, until `step` returns or the next
        # one begins.
        self._ended: Any = []
        self._closed = self._ready = False
        self._serial = next(_serials)
        self._loads = 0
        self._files = MappedFiles()  # of `load`
        self._steps = 0
        self._last: UpdateStats | None = None
        self._lock = threading.RLock()  # backward() has a thread for every GPU
        samples = samples_of(given)
        template = optimizer_class(samples, **kwargs)
        if not isinstance(getattr(template, "param_groups", None), list):
            raise UnsupportedError(
                f"{self._class_name} cannot be used with NVMeOptimizer: it has no param_groups, as torch's optimizers have"
            )
        super().__init__(given, dict(template.defaults))
        follow(self.param_groups, template.param_groups)
        self._maker = Maker(
            optimizer_class, kwargs, self.param_groups, in_groups=isinstance(samples[0], dict)
        )

        places = [
            os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)
        ]
        if not places:
            raise UsageError("paths must name at least one directory on a drive")
        try:
            memory = memory_size(host_memory)
        except ValueError:
            raise UsageError(
                f'host_memory must be "auto", bytes, or a size such as "8GB", not {host_memory!r}'
            ) from None
        self._tier = Tier(places, aio or engine_config(places[0]), host_memory=memory)
        try:
            self._format = wide_enough(self._format, self._class_name, self.param_groups)
            self._updater = Updater(self._tier, self._format, self._maker, self._class_name)
            self._updater.notes_norms = self._backward is not None
            budget = Budget(self._tier.cap_bytes)
            self._bucketing = Bucketing(
                self._class_name,
                self._maker,
                self._format,
                budget,
                f"optimizer{self._serial}",
                declared=elementwise,
                gradients=accumulate is not None,
                place_updates=place_updates,
            )
            self._binding = Binding(
                self._bucketing,
                budget,
                self._tier,
                self._updater,
                backwards=bool(step_in_backward),
                twice=step_in_backward == "provisional",
                has_gradients=accumulate is not None,
            )
            if accumulate is not None:
                self._sums = GradientSums(
                    self._tier, self._lock, self._updater.drain, self._recovering()
                )
            if step_in_backward == "provisional":
                self._provisional = ProvisionalUpdates(self._tier, self, self._overlap)
            if self._overlap:
                self._queue = BucketUpdates(self._source)
            if may_be_replaced(self.param_groups):
                for index, group in enumerate(self.param_groups):
                    self._bucketing.try_out(group["params"], self._options.of(index, group))
                self._options.forget()
                self._watch_gradients()
            else:
                self._bind()
        except BaseException:
            self._tier.close()
            raise
        self._template = template
        self._ready = True

    # The interface of torch.optim.Optimizer.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients.

        With `overlap_step` it queues the updates, after the updates of the previous step. If these
        have failed, it raises their error. A repeated call tries them again, and makes a new step
        only if there are other gradients.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again, with gradients, before the update.

        Returns
        -------
        object
            The result of *closure*; None without one.

        Raises
        ------
        UsageError
            The optimizer is closed, or parameters and states are out of sync.
        OffloadError
            The drive failed. `step` may be called again: see the class.
        """
        tried_again = self._queue is not None and self._queue.told
        if self._queue is not None:
            self._queue.check()
        self._recover()
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with self._lock, fixed_modes():
                self._make_step(tried_again=tried_again)
            # In one line: an exception comes either before it, so that a repeated step() changes
            # nothing, or after step() has returned.
            return self._ended.clear() or loss
        except BaseException as error:
            self._note(error)
            raise

    def _make_step(self, *, tried_again: bool) -> None:
        """The body of `step`. *tried_again*: a queued update has failed, and the caller tries it
        again.
        """
        self._bind()
        self._binding.check_trains()
        if self._open_step is None:
            self.synchronize()
            tried_again = tried_again or bool(self._ended)
            if tried_again and not any(weight.has_new_gradient for weight in self._weights):
                return  # the step was made already
        self._ended.clear()
        self._progress.running = True
        self._end_provisional()
        due = self._due()
        if self._can_queue(due):
            with known(self._queue).lock:  # no update begins before all are in order
                self._queue_updates(due)
                self._end_step()
        else:
            self._end_queueing()
            with self._clock.running():
                self._drain()
                self._tier.swapper.prefetch(
                    [bucket.name for bucket in due] if self._sums is None else self._sums.names(due)
                )
                for bucket in due:
                    self._update_now(bucket)
                self._drain()
                counts = self._counts
                self._end_step()
            self._last = self._clock.end_step(self._steps, **counts)
        self._progress.running = False

    def synchronize(self) -> None:
        """With `overlap_step`: return when all updates are made; on a GPU, when later work of the
        current stream is ordered after them. Otherwise, and if no update is pending, do nothing.

        Call it before parameters, their gradients or states are used in a way that does not wait:
        through other tensors that share their memory and were made before the step, in C++
        extensions and functions of TorchScript that receive a parameter, by
        `torch.as_tensor(parameter)` and the like, and in CUDA graphs. Call it also before
        process-wide settings, such as the default dtype, change: pending updates would run with the
        new settings.

        Raises
        ------
        OffloadError
            The drive failed. It may be called again, and continues with the remaining updates.
        """
        queue: BucketUpdates | None = self.__dict__.get("_queue")
        if queue is None:
            return
        queue.wait()
        if self._late:
            late = list(self._late)
            for index, key, before, value in late:
                # the program has not set it since
                if same(self.param_groups[index].get(key), before):
                    self.param_groups[index][key] = value
            self._changed_groups(sorted({key for _, key, _, _ in late}))
            del self._late[: len(late)]

    @fixed_modes()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`. Parameters that an unfinished step has not updated
        yet stay unchanged.

        Parameters
        ----------
        set_to_none : bool
            Drop gradients; False fills them with zeros.
        """
        self._recover()
        self._ended.clear()
        self._undo_provisional()
        if self._provisional is not None:
            self._provisional.end_step()
        if self._backward is not None:
            self._backward.end_step()
        self._has_begun = False
        if self._updated and not self._broken:
            if any(bucket.has_gradient for bucket in self._buckets if bucket not in self._updated):
                _log.warning(
                    "a step is given up after %d of %d buckets: their parameters are one step ahead",
                    len(self._updated),
                    len(self._buckets),
                )
            self._end_step()
            self._ended.clear()
        super().zero_grad(set_to_none)
        if self._backward is not None:
            self._backward.zero(set_to_none=set_to_none)
        if self._sums is not None:
            if self._broken:
                self._sums.reset()
            else:
                self._sums.clear()

    @fixed_modes()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`. If it raises, nothing is changed.

        Parameters
        ----------
        param_group : dict
            "params", and options that differ from the defaults.

        Raises
        ------
        UsageError
            A parameter is in another group already, or *host_memory* is too small for it.
        UnsupportedError
            A parameter is of a kind that cannot be offloaded.
        NoSpaceError
            The drives have no room for its states.
        """
        if not self._ready:
            super().add_param_group(param_group)
            return
        self._settle()
        self._recover()
        if self._weights:
            self._bind()  # errors of this call do not concern the new group
        if isinstance(param_group, dict):  # torch refuses anything else
            materialised([param_group])
        [sample] = samples_of([param_group])
        super().add_param_group(param_group)
        groups, samples = self.param_groups, self._template.param_groups
        before = len(samples)
        try:
            self._template.add_param_group(sample)
            follow(groups[-1:], samples[before:])
            self._maker.add(groups[-1])
            if self._weights or not may_be_replaced(groups):
                self._bind()
            else:
                self._watch_gradients()
        except BaseException:
            groups.pop()
            del samples[before:]
            self._options.forget([len(groups)])
            raise

    def state_dict(self) -> dict[str, Any]:
        """States and options in the format of the plain optimizer, which can load them.

        States of 16-bit parameters have a "master" in addition. "nvme_offload", next to "state" and
        "param_groups", says how states are kept; loading does not depend on it. The parameters may
        have moved to another device since the last step: Lightning saves after it has moved them.

        Returns
        -------
        dict
            Tensors are copies on the CPU, mapped from a file on the first drive: they take memory
            as they are read, and the kernel can reclaim it. Unlike torch's, they do not share
            memory with the states: change `state`, or load the changed dictionary.

        Raises
        ------
        UsageError
            The optimizer is closed, or in the middle of a step.
        NoSpaceError
            The first drive has no room for the file.
        """
        with self._with_states(
            lambda: saved.collect(self._updater, self._buckets, self._weights, self._tier.paths[0])
        ) as tree:
            return tree

    def save(self, path: str | os.PathLike[str], *, group: Any = None) -> None:
        """Write states and options to *path*, as they are kept: states of 8 bits take 8 bits, and
        masters take the bits that their weights lack.

        It writes nothing else, and has a few buckets in memory at a time. The states replace older
        ones at *path* completely, or not at all. To load them, load the model's weights first, then
        call `load`; *state_format* may be another one by then.

        One process writes a file of `torch.save`, which
        ``optimizer.load_state_dict(torch.load(path, mmap=True))`` loads too. Ranks whose parameters
        are DTensors (FSDP2, tensor parallelism) save together: every rank calls this, at the same
        time, with one path on a filesystem that they share. It becomes a directory with a file of
        each rank and a manifest with checksums. Ranks that give different paths write a file each.

        Ranks with plain tensors write files. With DDP one rank suffices. If ranks have different
        parameters (`ZeroRedundancyOptimizer`, FSDP1), pass *group*, or a path for each rank.

        Parameters
        ----------
        path : path
            The file or directory, on any filesystem. Missing parent directories are created.
        group : ProcessGroup, optional
            The ranks that save together; by default the ranks of the parameters' mesh.

        Raises
        ------
        UsageError
            The optimizer is closed, or in the middle of a step; the ranks do not share the
            filesystem of *path*; or another rank saves other parameters there.
        UnsupportedError
            *aio* asks for O_DIRECT, which the filesystem of *path* does not have.
        NoSpaceError
            The filesystem of *path* has no room for the file.
        IOFailure
            A directory cannot be created, or a drive failed.
        OffloadError
            Another rank failed; the message gives its error.
        """
        self._check_open()
        unbound = self._binding_failure(lazily=True)
        place, engine = Path(path), self._tier.store.engine

        def states() -> contextlib.AbstractContextManager[dict[str, Any]]:
            if unbound is not None:
                raise unbound
            return self._with_states(
                lambda: saved.as_kept(self._updater, self._buckets, self._weights)
            )

        ranks = parts.ranks_of(self._weights, group)
        if ranks is not None and not parts.differ(place, ranks):
            parts.claim_together(place, self._moment, ranks)
            saved.write_together(states, place, engine, ranks, self._steps)
            return
        with states() as tree:
            if ranks is None:
                parts.claim(place, self._moment, parts.values_of(self._weights))
            saved.write(tree, place, engine)

    def load(
        self, path: str | os.PathLike[str], *, group: Any = None, weights_only: bool = True
    ) -> None:
        """Load the states that `save` wrote to *path*; load the model's weights first.

        Ranks that saved together load together. Their number and the mesh of DTensors may have
        changed: each rank then reads its parts from all files. A file of one process loads into
        DTensors, too. States of 8 bits are rounded again where their blocks are cut differently.
        Files are compared with the checksums, and nothing is loaded unless every rank can load its
        part.

        Parameters
        ----------
        path : path
            The file or directory.
        group : ProcessGroup, optional
            As for `save`. For a directory of ranks with plain tensors: by default all ranks.
        weights_only : bool
            As for `torch.load`: False for states that are objects of other classes.

        Raises
        ------
        UsageError, ValueError
            The states belong to other parameters, or to another rank's part of them. Nothing is
            changed.
        UnsupportedError
            Another number of ranks saved them, and their parameters are plain tensors.
        CorruptionError
            A file differs from the file that was written. Nothing is changed.
        OffloadError
            The drive failed, or another rank did; the message gives its error. Load again before
            the next step.
        """
        self._check_open()
        self._give_up_what_fails()
        unbound = self._binding_failure()
        place = Path(path)

        def read(file: Path) -> Any:
            tree = self._files.load(file, weights_only)
            if not (isinstance(tree, Mapping) and {"state", "param_groups"} <= tree.keys()):
                raise UsageError(
                    f"{file} has no states of an optimizer: give the path that optimizer.save() wrote, and load a model's file into the model"
                )
            return tree

        ranks = parts.ranks_of(self._weights, group)
        if ranks is None and place.is_dir():
            ranks = parts.of_group()

        def fitting(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
            if len(trees) == 1 and resharding.fits(trees[0], self._weights):
                return trees[0]
            return resharding.reshard(trees, self._weights)

        with self._files:
            if ranks is None or not parts.all_are_directories(place, ranks):
                if unbound is not None:
                    raise unbound
                tree = read(place)
                self.load_state_dict(tree if resharding.is_cut(tree) else fitting([tree]))
                return
            refusal = f"{place} was not loaded"
            tree = {}

            def check() -> None:
                if unbound is not None:
                    raise unbound
                engine = self._tier.store.engine
                tree.update(fitting(saved.read_together(place, engine, ranks, read, self._weights)))
                self._check_loadable(tree)

            ranks.together(check, refusal)
            ranks.together(lambda: self.load_state_dict(tree), refusal)

    @property
    def _moment(self) -> list[int]:
        """Numbers that are equal on all ranks if ranks that train together save together."""
        return [self._serial, self._loads, self._steps]

    @contextlib.contextmanager
    def _with_states(self, collect: Callable[[], list[dict[Any, Any]]]) -> Iterator[dict[str, Any]]:
        """A state dict with the states that *collect* makes. The states do not change in the
        context.
        """
        self._settle()
        self._recover()
        self._check_usable()
        if self._weights or any(dict.values(self._state)):
            self._bind(lazily=True)
        check_resized(self._weights, self._state, self.param_groups)
        with self._lock, fixed_modes():
            self._progress.running = True
            self._drain()
            small = self._state

            def show(_: torch.optim.Optimizer) -> None:
                self._take_up_states()
                self._state = defaultdict(
                    dict,
                    {
                        weight.parameter: state
                        for weight, state in zip(self._weights, collect(), strict=True)
                        if state
                    },
                )

            handle = self.register_state_dict_pre_hook(show)  # after the program's hooks
            try:
                packed: dict[str, Any] = super().state_dict()
            finally:
                handle.remove()
                self._state = small
            wide = {"wide": True} if self._updater.wide else {}
            part = parts.part_of(self._weights)
            yield {
                **packed,
                "nvme_offload": {
                    "state_format": self._format.name,
                    **wide,
                    "steps": self._steps,
                    **({} if part is None else {"part": part}),
                },
            }
            self._progress.running = False

    @fixed_modes()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states that this or the plain optimizer saved, one bucket at a time.

        Load the model's weights, too: they are not made from the masters. Masters of 16-bit
        parameters without a "master" are made from the weights.

        Parameters
        ----------
        state_dict : mapping
            As `state_dict` returns it.

        Raises
        ------
        UsageError, ValueError
            It belongs to other parameters. Nothing is changed.
        OffloadError
            The drive failed. Load it again before the next step.
        """
        self._give_up_what_fails()
        loaded: dict[Weight, dict[str, Any]] = {}
        steps, wide = 0, False

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            nonlocal steps, wide
            loaded.update(self._check_loadable(given))
            wide = bool(given.get("nvme_offload", {}).get("wide"))
            steps = given.get("nvme_offload", {}).get("steps") or max(
                map(saved.steps, loaded.values()), default=0
            )
            return {**given, "state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            for group in self.param_groups:
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
            if self._broken:
                self._reset()
            self._forget_step()
            if self._provisional is not None:
                self._provisional.forget(self._buckets)
            self._updater.wide = wide
            self._restore(loaded)
            self._steps = steps
            self._loads += 1

        with self._lock:
            self._check_open()
            if self._weights or state_dict.get("state"):
                self._bind()
            hooks = [
                self.register_load_state_dict_pre_hook(take),
                self.register_load_state_dict_post_hook(put, prepend=True),
            ]
            try:
                super().load_state_dict(dict(state_dict))
            finally:
                for hook in hooks:
                    hook.remove()

    def _check_loadable(self, given: Mapping[str, Any]) -> dict[Weight, dict[str, Any]]:
        """The state of each parameter in the state dict *given*. Raises: UsageError."""
        told = given.get("nvme_offload", {})
        if "part" in told:
            parts.check_part(told["part"], self._weights)
        elif told and parts.is_cut(self._weights):
            _log.warning(
                "an older version saved these states, without the part of the parameters to which they belong: check that this rank has saved them"
            )
        indices = [index for group in given["param_groups"] for index in group["params"]]
        found = {}
        # the base class raises if the lengths differ
        for weight, index in zip(self._weights, indices, strict=False):
            found[weight] = given["state"].get(index, {})
            saved.check(found[weight], weight)
        groups = given["param_groups"]
        if len(groups) == len(self.param_groups):  # otherwise the base class raises
            self._bucketing.check_keys(found, [{**self.defaults, **group} for group in groups])
        return found

    @fixed_modes()
    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settle()
        given = dict(state)
        if "state" in given:
            self.state = given.pop("state")
        super().__setstate__(given)

    # In addition to that interface.

    def stats(self) -> UpdateStats:
        """Transfers and waits of the last step. With `overlap_step` it waits for the updates.

        Returns
        -------
        UpdateStats

        Raises
        ------
        UsageError
            There was no step yet.
        OffloadError
            As `synchronize`.
        """
        self.synchronize()
        if self._last is None:
            raise UsageError("this optimizer has made no step yet")
        return self._with_waits(self._last)

    @property
    def last_stats(self) -> UpdateStats | None:
        """`stats` of the last step whose updates have all been made; None before the first. It
        never waits, even with `overlap_step`: for progress bars and loggers.
        """
        if self._last is None or (self._queue is not None and self._queue.has_jobs):
            return self._last
        return self._with_waits(self._last)

    def _with_waits(self, stats: UpdateStats) -> UpdateStats:
        if self._queue is None:
            return stats
        return dataclasses.replace(stats, update_wait_seconds=self._queue.waited_seconds)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """With `step_in_backward`: accumulate gradients in the backward passes of the context,
        without updates.
        """
        if self._backward is None:  # they accumulate anyway
            yield
            return
        before, self._backward.accumulating = self._backward.accumulating, True
        try:
            yield
        finally:
            self._backward.accumulating = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, for all gradients of the optimizer's parameters.

        Gradients in host memory are loaded one by one for their norms, and scaled at their next
        use.

        Parameters
        ----------
        max_norm : float
            Upper limit of the norm of the gradients.
        norm_type : float
            Order of the norm; ``inf`` for the largest element.
        error_if_nonfinite : bool
            Raise RuntimeError if the norm is infinite or not a number.

        Returns
        -------
        torch.Tensor
            The norm before clipping, of one element.
        """
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(
            [parameter for _, parameter in parameters_of(self.param_groups)],
            max_norm,
            norm_type,
            error_if_nonfinite,
        )
        return norm

    @fixed_modes()
    def close(self) -> None:
        """Free memory and space on the drives; a second call does nothing. Only the parameters are
        left.

        Raises: with `overlap_step`, the error of the last updates; the optimizer is closed
        nevertheless.
        """
        with self._lock:
            if not self._closed:
                try:
                    self._recover()
                    self.synchronize()
                finally:
                    self._closed = True
                    if self._queue is not None:
                        self._queue.stop(finish=False)
                        self._queue = None
                    for hook in self._hooks.values():
                        hook.remove()
                    if self._gradient_hooks is not None:
                        self._gradient_hooks.close()
                    if not self._broken:
                        self._drain()
                        if self._provisional is not None:
                            self._provisional.abandon()
                    if self._sums is not None:
                        self._sums.close(self._weights)
                    self._tier.close()

    def __enter__(self) -> NVMeOptimizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "an NVMeOptimizer cannot be copied, as its states are on a drive: make another one, and load this one's state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "an NVMeOptimizer cannot be pickled, as its states are on a drive: save its state_dict()"
        )

    # Further methods and attributes of the optimizer class.

    def __getattr__(self, name: str) -> Any:
        """Attributes that this class lacks come from *optimizer_class*. A method works on all
        parameters, with their states, as it does in memory.
        """
        template = self.__dict__.get("_template")
        if template is None or name.startswith("_") or not hasattr(template, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and neither has the optimizer that it was given"
            )
        if inspect.isroutine(getattr(template, name)):
            return functools.partial(self._call, name)
        self._settle()
        made = [bucket.inner for bucket in self._buckets if bucket.inner is not None]
        return self._agreed(name, [getattr(optimizer, name) for optimizer in made or [template]])

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that *optimizer_class* has and this class lacks is set on the inner
        optimizers.
        """
        template = self.__dict__.get("_template")
        if (
            template is None
            or name.startswith("_")
            or name in self.__dict__
            or hasattr(type(self), name)
            or not hasattr(template, name)
        ):
            super().__setattr__(name, value)
            return
        self._settle()
        for optimizer in [
            template,
            *(bucket.inner for bucket in self._buckets if bucket.inner is not None),
        ]:
            setattr(optimizer, name, value)
        self._updater.attributes[name] = value

    @fixed_modes()
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        self._recover()
        with self._lock:
            self._check_usable()
            self._bind()
            self._progress.running = True
            self._drain()
            self._take_up_states()
            if self._updated:
                raise UsageError(
                    f"{name}() cannot be called in the midst of a step: call step() or zero_grad() first"
                )
            results: list[Any] = []

            def call(one: torch.optim.Optimizer) -> None:
                result = getattr(one, name)(*args, **kwargs)
                results.append(self if result is one else result)

            for bucket in self._buckets:
                if bucket.trained or bucket.layout is not None:
                    try:
                        memory = self._updater.open(bucket)
                        for fragment in bucket.fragments:
                            fragment.weight.look()
                        left = self._updater.call(
                            bucket, memory, self._options_of(bucket), call, self._progress
                        )
                    except BaseException as error:
                        # a method that raises for the first parameters should have changed nothing
                        ended = self._progress.changing and not isinstance(error, Exception)
                        self._progress.changing = False
                        if results or ended:
                            self._broken = f"{name}() failed for some parameters ({type(error).__name__}: {error})"
                        self._options.forget()
                        raise
                    self._options.left(left)
                    self._show(bucket)
                    self._progress.changing = False
            self._drain()
            self._options.end(self.param_groups)
            self._progress.running = False
            return self._agreed(f"{name}()", results or [None])

    def _agreed(self, name: str, values: Sequence[Any]) -> Any:
        if not all(same(value, values[0]) for value in values[1:]):
            raise UsageError(
                f"{name} of {self._class_name} has another value for each bucket of parameters, so that there is no one value to give"
            )
        return values[0]

    # Internals.

    @property
    def _weights(self) -> list[Weight]:
        return self._binding.weights

    @property
    def _buckets(self) -> list[Bucket]:
        return self._binding.buckets

    def _binding_failure(self, *, lazily: bool = False) -> Exception | None:
        """The error of `_bind`. A rank that saves or loads together with others raises it when the
        ranks exchange their errors: they would wait for a rank that had raised before.
        """
        try:
            self._bind(lazily=lazily)
        except Exception as error:
            return error
        return None

    def _bind(self, *, lazily: bool = False) -> None:
        """Follow changes of the parameters since the last call. Parameters that are new in
        `param_groups` get buckets; parameters that were moved, cast or unfrozen get other buckets,
        with their states. As in torch, `state` keeps states of parameters that are in no group.

        *lazily*: ignore moves, casts and unfreezing. Raises: UsageError, UnsupportedError and
        NoSpaceError for parameters that cannot be bound; their states stay in `state`.
        """
        if not self._binding.differs(self.param_groups, forms=not lazily):
            return
        with self._lock, fixed_modes():
            self._settle()
            self._recover()
            self._check_usable()
            plan = self._binding.plan(self.param_groups)
            check_resized(plan.bound_again, self._state, self.param_groups)
            updated = self._updated_of(plan)
            for _, parameter in parameters_of(self.param_groups):
                self._check_parameter(parameter)
            self._progress.running = True
            self._drain()
            try:
                made, buckets = self._replace(plan, updated)
            except DividedOtherwiseError:
                plan = self._binding.plan_of_all(plan)
                updated |= self._updated_of(plan)
                made, buckets = self._replace(plan, updated)
            given = self._given_to(made)
            self._binding.commit(self.param_groups, made, buckets)
            self._updated.update(
                bucket
                for bucket in buckets
                if all(fragment.weight in updated for fragment in bucket.fragments)
            )
            if not self._updated:
                self._options.forget()  # a step may have begun with other groups
            if len(buckets) == len(self._buckets):  # the tier was reset
                self._clock = UpdateClock(self._tier)
            if any(bucket.device.type == "cpu" for bucket in self._buckets):
                use_share_of_cores()
            for bucket in buckets:
                if bucket.trained and bucket.traits.eager:
                    self._updater.start(
                        bucket, self._updater.open(bucket), self._options_of(bucket)
                    )
                    self._show(bucket)
            self._drain()
            self._watch_gradients()
            if self._sums is not None:
                self._sums.limit(self._buckets)
            if given:
                self._restore(given, bound_again=True)
            self._progress.running = False

    def _updated_of(self, plan: Plan) -> set[Weight]:
        """The weights of *plan* that the present step has updated already. Raises: UsageError if it
        has updated only a part of a weight.
        """
        updated = set()
        for weight in plan.bound_again:
            made = [fragment.bucket in self._updated for fragment in weight.fragments]
            if any(made):
                updated.add(weight)
            if any(made) and not all(made):
                raise UsageError(
                    "a parameter was moved, cast or replaced when a step that failed had updated a part of it: undo that and call step() again, or load "
                    "a checkpoint"
                )
        return updated

    def _check_parameter(self, parameter: torch.Tensor) -> None:
        if self._backward is not None:
            self._backward.check(parameter)
        if self._overlap:
            _check_class(parameter)
        if self._sums is not None:
            self._sums.check(parameter)

    def _bring_states(self, plan: Plan) -> None:
        """Replace the placeholders in `state` of states in the buckets of *plan* by tensors, which
        are mapped from a file without a name on the first drive.
        """
        states = {key: state for key, state in dict.items(self._state) if isinstance(state, dict)}
        shown = {
            id(leaf): local(leaf)
            for state in states.values()
            for leaf in tensors(state).values()
            if is_on_drive(leaf)
        }
        needed = {one.weight for one in shown.values() if isinstance(one, StateOnDrive)}
        buckets = [
            bucket
            for bucket in plan.buckets
            if any(fragment.weight in needed for fragment in bucket.fragments)
        ]
        weights = list(
            dict.fromkeys(fragment.weight for bucket in buckets for fragment in bucket.fragments)
        )
        found = dict(
            zip(
                weights,
                saved.collect(self._updater, buckets, weights, self._tier.paths[0]),
                strict=True,
            )
        )
        brought: dict[int, torch.Tensor] = {}
        for key, one in shown.items():
            if isinstance(one, StateOnDrive) and one.weight in found and one.is_current:
                whole = tensors(found[one.weight]).get(one.key)
                if whole is not None:
                    brought[key] = one.of(local(whole)) if one.ways else whole
        for parameter, state in states.items():
            if any(id(leaf) in brought for leaf in tensors(state).values()):
                dict.__setitem__(self._state, parameter, replaced(dict.copy(state), brought))

    def _replace(
        self, plan: Plan, updated: Collection[Weight]
    ) -> tuple[list[Weight], list[Bucket]]:
        """Replace the buckets of *plan*; return the weights and buckets to bind instead."""
        self._bring_states(plan)
        if self._sums is not None:
            self._sums.release(plan.weights)
        self._release(plan)
        return self._binding.admit(self.param_groups, self._options.of, plan, updated)

    def _release(self, plan: Plan) -> None:
        before, self._broken = self._broken, "parameters were being bound anew"
        for weight in plan.weights:
            state = dict.get(self._state, weight.parameter)
            if state is not None and state is weight.shown:
                state = dict.copy(state)
                dict.__setitem__(self._state, weight.parameter, state)
            hook = self._hooks.pop(weight, None)
            if hook is not None:
                hook.remove()
            self._uses.pop(weight, None)
            if state and Form.of(weight.parameter).dtype != weight.form.dtype:
                # the cast parameter counts, not its old master
                state.pop(MASTER, None)
        if self._queue is not None:
            self._queue.uses.clear()
        if self._backward is not None:
            self._backward.forget()
        if self._provisional is not None:
            self._provisional.forget_order(plan.buckets)
        self._updated.difference_update(plan.buckets)
        self._binding.release(plan)
        self._broken = before

    def _given_to(self, weights: Sequence[Weight]) -> dict[Weight, dict[str, Any]]:
        """The states in `state` of *weights*, which are not bound yet. Raises: UsageError."""
        given = {}
        for weight in weights:
            state = dict.get(self._state, weight.parameter)
            if state and weight.fragments:
                saved.check(state, weight)
                given[weight] = dict(state)
        self._bucketing.check_keys(given, self.param_groups)
        return given

    def _watch_gradients(self) -> None:
        if self._gradient_hooks is not None:
            self._gradient_hooks.watch(one for _, one in parameters_of(self.param_groups))

    def _drain(self) -> None:
        """Return when no value of the tier is in use."""
        self._updater.drain()
        if self._sums is not None:
            self._sums.settle()

    def _options_of(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        return {index: self._options.of(index, self.param_groups[index]) for index in bucket.groups}

    def _update_now(self, bucket: Bucket) -> None:
        self._options.left(
            self._update(bucket, self._options_of(bucket), self._steps, self._progress)
        )
        self._updated.add(bucket)
        self._progress.changing = False

    def _update(self, bucket: Bucket, options: Options, seed: int, progress: Progress) -> Options:
        """Update the parameters of *bucket*; return the *options* as the inner optimizer left them.
        The caller records these, and then ends the change in *progress*.
        """
        # if these raise, nothing is changed
        if self._sums is not None:
            self._sums.take(bucket)
        memory = self._updater.open(bucket)
        for fragment in bucket.fragments:
            fragment.weight.look()
        left = self._updater.step(bucket, memory, options, seed, progress)
        if self._sums is not None:
            self._sums.done(bucket)
        self._show(bucket)
        return left

    def _update_provisionally(self, bucket: Bucket) -> None:
        """Update the parameters of *bucket* so that the update can be undone. If that is
        impossible, or fails, `step` makes the update.
        """
        provisional = known(self._provisional)
        if not (provisional.may_begin(bucket) and self._updater.keeps_layout(bucket, self._steps)):
            return
        self._tier.swapper.write_back(bucket.name)  # an undo returns to this version
        memory = self._updater.open(bucket)
        before = provisional.before(bucket)
        try:
            for fragment in bucket.fragments:
                fragment.weight.look()
            left = self._updater.step(
                bucket, memory, self._options_of(bucket), self._steps, self._progress
            )
            if provisional.draws(before):
                self._undo(lambda: provisional.roll_back(before))
            else:
                provisional.made(before, left)
                self._updated.add(bucket)
                self._show(bucket)
            self._progress.changing = False
        except BaseException as error:
            self._undo_after(error, before)
            raise

    def _undo_after(self, error: BaseException, before: Before) -> None:
        """Undo the update of *before*, which *error* has ended, without waiting for the next call:
        the program may write to the parameters before that. An error of the undo is logged, since
        the caller raises *error*.
        """
        self._broken = f"updates were being undone ({type(error).__name__}: {error})"
        try:
            self._updater.recover(self._buckets)
            self._tier.end_uses()
            for bucket in known(self._provisional).roll_back(before):
                self._updated.discard(bucket)
                self._show(bucket)
        except Exception as failure:
            _log.warning(
                "an update was not undone, so that a checkpoint must be loaded: %s", failure
            )
        else:
            self._progress.changing = False
            self._broken = ""

    # After an exception.

    def _note(self, error: BaseException) -> None:
        """Record the consequences of *error*, which ends this call, for the next call."""
        self._cause = f" ({type(error).__name__}: {error})"
        if self._progress.changing and not self._broken:
            self._broken = f"a step failed in the midst of an update{self._cause}"
        if self._ended:
            for weight in self._weights:
                weight.mark_gradient()

    def _recovering(self) -> Callable[[], None]:
        """`_recover`, for objects that this optimizer owns."""
        source = self._source

        def recover() -> None:
            optimizer = source()
            if optimizer is not None:
                optimizer._recover()

        return recover

    def _recover(self) -> None:
        """Continue after a call that an exception has ended, at any line: end uses of values, and
        find out whether the step can continue. Every method that uses values calls it first.
        """
        if self._queue is not None and self._queue.is_dead and not self._broken:
            self._broken = "the thread of the updates has ended"
        if self._backward is not None and self._backward.was_cut_short() and not self._broken:
            self._broken = "backward() failed after a part of its updates"
        jobs_run = self._queue is not None and self._queue.is_running
        if not (
            self._progress.running
            or (self._job_progress.running and not jobs_run)
            or (self._sums is not None and self._sums.running)
        ):
            return
        with self._lock:
            if self._queue is not None and jobs_run:
                self._queue.quiesce()
            self._tier.end_uses()
            if not self._broken:
                if self._progress.changing or self._job_progress.changing:
                    self._broken = "a step failed in the midst of an update"
                elif self._tier.interrupted:
                    self._broken = f"a call was interrupted{self._cause}"
            self._cause = ""
            if not self._broken:
                self._updater.recover(self._buckets)
                if self._sums is not None:
                    self._sums.recover(self._buckets)
                if self._provisional is not None:
                    self._provisional.commit_but_made(self._buckets)
                if self._ended:
                    self._end_step()
            self._progress.running = self._job_progress.running = False
            if self._sums is not None:
                self._sums.running = False

    def _reset(self) -> None:
        """Forget all states and all gradients in host memory, even if an exception has damaged
        them.
        """
        if self._queue is not None:
            self._queue.abandon()
        for weight in self._weights:
            weight.awaited = None  # it has the gradient of a step that was not made
        self._updater.reset(self._buckets)
        if self._sums is not None:
            self._sums.reset()
        self._tier.reset()
        for bucket in self._buckets:
            bucket.forget()
        if self._provisional is not None:
            self._provisional.forget(())
        self._progress, self._job_progress = Progress(), Progress()
        self._ended.clear()

    def _end_provisional(self) -> None:
        """The gradients and options of this step are final: undo the updates that used other
        ones.
        """
        if self._provisional is not None:
            self._provisional.check()
            # otherwise an earlier attempt of this step has made final updates, with the options of
            # that time
            all_provisional = len(self._updated) == len(self._provisional)
            if all_provisional and self._options.differ(self.param_groups):
                self._undo_provisional()
                self._options.forget()
            provisional = self._provisional
            self._undo(lambda: provisional.roll_back_changed(self._options))

    @fixed_modes()
    def _undo_provisional(self) -> None:
        """Undo the provisional updates of this step: before parameters or states are read, or if no
        `step` follows.
        """
        if self._provisional:
            self._recover()
            with self._lock:
                self._undo(self._provisional.roll_back_all)

    def _undo(self, roll_back: Callable[[], Sequence[Bucket]]) -> None:
        """Undo updates by *roll_back*, which returns their buckets. If an exception interrupts it,
        parameters and states are out of sync until a checkpoint is loaded.
        """
        if self._broken:
            return
        self._drain()
        # in case an exception, such as Ctrl-C, interrupts that
        self._broken = "updates were being undone"
        for bucket in roll_back():
            self._updated.discard(bucket)
            self._show(bucket)
        self._broken = ""

    @fixed_modes()
    def _settle(self) -> None:
        """Before states are read: undo provisional updates, and complete the last step."""
        self._undo_provisional()
        self.synchronize()

    @property
    def _counts(self) -> dict[str, int]:
        counts = {"buckets": len(self._updated)}
        if self._provisional is not None:
            counts["updated_in_backward"] = self._provisional.made_count
            counts["rolled_back"] = self._provisional.rolled_back_count
        return counts

    def _end_step(self) -> None:
        """End a step whose updates have all been made or queued. After an exception it can be
        repeated.
        """
        if not self._ended:
            self._ended.append(self._steps + 1)
        self._changed_groups(self._options.end(self.param_groups))
        if self._provisional is not None:
            self._provisional.step_made()
        if self._open_step is None:
            self._tier.swapper.step()
        else:
            self._open_step.counts = self._counts
            self._end_queued(self._open_step)
        self._steps = self._ended[0]
        self._forget_step()

    def _forget_step(self) -> None:
        if self._sums is not None:
            self._sums.spend(list(self._updated))
        self._updated.clear()
        self._left, self._leaves = self._leaves, False
        self._has_begun = False
        self._options.forget()
        self._open_step = None
        if self._backward is not None:
            self._backward.end_step()
        if self._provisional is not None:
            self._provisional.end_step()

    def _show(self, bucket: Bucket) -> None:
        """Put the states of the bucket's parameters into `state`: small values as they are, and
        placeholders for all others.
        """
        for fragment in bucket.fragments:
            weight = fragment.weight
            if fragment is weight.fragments[0]:
                if weight.shown is None:
                    weight.shown = ShownState(weight, saved.check, _settling(self._source))
                elif weight.shown.shows(fragment) and (
                    dict.get(self._state, weight.parameter) is weight.shown
                    or not dict.__len__(weight.shown)
                ):
                    continue
                there: dict[Key, torch.Tensor] = {}
                for key, form in saved.forms(fragment).items():
                    own = local(weight.placeholders[key]) if key in weight.placeholders else None
                    if own is not None and (own.dtype, own.shape, own.stride()) == (
                        form.dtype,
                        form.shape,
                        form.stride(),
                    ):
                        there[key] = weight.placeholders[key]
                    else:
                        placeholder = StateOnDrive(self._source, weight, key, form, bucket.home)
                        there[key] = (
                            placeholder
                            if key in fragment.rest
                            else like(weight.parameter, placeholder)
                        )
                weight.placeholders = there
                whole = saved.in_place_of_leaves(weight, there, lambda small: small)
                weight.shown.show(whole, fragment)
                if dict.__len__(weight.shown):
                    dict.__setitem__(self._state, weight.parameter, weight.shown)

    def _take_up_states(self) -> None:
        """Apply the program's changes of `state`: store states that were added, and drop states
        that were removed.
        """
        given = {}
        for weight in self._weights:
            state = dict.get(self._state, weight.parameter, {})
            if not weight.fragments:
                continue
            if bool(state) if weight.shown is None else weight.shown.differs_from(state):
                saved.check(state, weight)
                given[weight] = dict(state)
        if given:
            self._bucketing.check_keys(given, self.param_groups)
            self._restore(given)
        self._state_was_asked_for = False
        # `state` has the small values of the first fragment only, and the program may have changed
        # them in place
        if not self._updated:
            for weight in self._weights:
                for fragment in weight.fragments[1:]:
                    if fragment.bucket.layout is None:
                        continue  # an aborted first step has not reached this fragment
                    there = set(map(top, fragment.leaves))
                    fragment.states.update(
                        copy.deepcopy(
                            {key: value for key, value in weight.states.items() if key not in there}
                        )
                    )

    @fixed_modes()
    def read_state(self, weight: Weight, key: Key) -> torch.Tensor:
        """A copy of a state on the drive, for its placeholder in `state`.

        Parameters
        ----------
        weight : Weight
            The parameter of the state.
        key : Key
            The path of the state in `state`.

        Returns
        -------
        torch.Tensor
            On the device of the parameter.

        Raises
        ------
        UsageError
            The state no longer exists.
        OffloadError
            The drive failed.
        """
        self._settle()
        self._recover()
        with self._lock:
            self._check_usable()
            self._progress.running = True
            self._drain()
            form = saved.forms(weight.fragments[0]).get(key)
            if form is None:
                raise UsageError(f"the parameter has no state {key!r} any more")
            whole = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)
            for fragment in (
                weight.fragments[:1] if key in weight.fragments[0].rest else weight.fragments
            ):
                with self._updater.reading(fragment.bucket) as find:
                    values = saved.in_a_row(find(fragment, key))
                    saved.in_a_row(whole)[fragment.start :][: values.numel()].copy_(values)
            self._progress.running = False
            return whole.to(weight.fragments[0].bucket.home)

    @fixed_modes()
    def write_state(self, weight: Weight, key: Key, values: torch.Tensor) -> None:
        """Replace a state on the drive, for its placeholder in `state`.

        Parameters
        ----------
        weight : Weight
            The parameter of the state.
        key : Key
            The path of the state in `state`.
        values : torch.Tensor
            The new values.

        Raises
        ------
        OffloadError
            The drive failed.
        """
        self._settle()
        self._recover()
        with self._lock:
            self._take_up_states()
            self._restore(
                {weight: replaced(dict(weight.shown), {id(weight.placeholders[key]): values})}
            )

    def _restore(
        self, given: Mapping[Weight, dict[str, Any]], *, bound_again: bool = False
    ) -> None:
        """Store the states *given* on the drive. If they are states of parameters that are *bound
        again*, dtypes stay as torch has them, and masters follow the parameters.
        """
        self._drain()
        self._broken = "states were being loaded"
        for weight, state in given.items():
            dict.pop(self._state, weight.parameter, None)
            if state and not weight.fragments:  # until the parameter has a bucket
                dict.__setitem__(self._state, weight.parameter, state)
            weight.updates += 1
        for bucket in self._buckets:
            if any(fragment.weight in given for fragment in bucket.fragments):
                keeps = bound_again and self._bucketing.goes_on_with(
                    bucket, given, self.param_groups
                )
                saved.restore(self._updater, bucket, given, self.param_groups, keep_dtypes=keeps)
                self._files.drop()
                self._show(bucket)
        if bound_again:
            for weight in given:
                weight.changes += 1
        self._broken = ""

    @fixed_modes()
    def gradient_came(self, parameter: torch.Tensor) -> None:
        """Autograd or FSDP2 calls this during backward(). Parameters that cannot be updated here
        are left to `step`, since an error here would leave other ranks waiting for this one.

        Parameters
        ----------
        parameter : torch.Tensor
            Its gradient is complete.

        Raises
        ------
        OffloadError
            The drive failed, with *accumulate*; or the parameter is of a kind that cannot be
            updated here.
        """
        backward = self._backward
        if backward is not None:
            if backward.accumulating or self._broken:
                return
            # again: there may be more processes than when the optimizer was made
            backward.check(parameter)
        weight = self._bound(parameter)
        if weight is None or not weight.fragments:
            return
        if backward is None:
            known(self._sums).move(weight)
            return
        self._begin_backward()
        weight.settle_gradient()
        if self._provisional is not None or not weight.visits_device:
            await_copy(weight.parameter)  # the CPU reads the gradient
        try:
            with self._lock:
                self._update_complete(weight)
        except BaseException as error:
            self._note(error)
            raise

    def _bound(self, parameter: torch.Tensor) -> Weight | None:
        """In backward(): the weight of *parameter*; None if it is in no group, or if it cannot be
        bound, in which case `step` raises the error.
        """
        weight = self._binding.of(parameter)
        task = torch._C._current_graph_task_id()
        if task != self._bound_in_task or (weight is not None and not weight.is_as_bound):
            self._bound_in_task = task
            try:
                self._bind()
            except Exception as error:
                self._note(error)
                _log.warning("parameters are not bound in backward(): %s", str(error))
            weight = self._binding.of(parameter)
        return weight if weight is not None and weight.is_as_bound else None

    def _update_complete(self, weight: Weight) -> None:
        """Update the buckets that waited only for the gradient of *weight*."""
        backward = known(self._backward)
        self._recover()
        self._ended.clear()
        self._progress.running = True
        if self._provisional is not None:
            self._provisional.complete(weight)
        for bucket in backward.complete(weight):
            if not self._broken:
                try:
                    self._update_in_backward(bucket)
                except Exception as error:
                    if not self._left:
                        _log.warning(
                            "an update during backward() failed, and is left to step(); so is any other that fails: %s",
                            error,
                        )
                    self._left = self._leaves = True
                    self._note(error)
                    self._recover()
                    self._progress.running = True
        self._progress.running = False

    def _update_in_backward(self, bucket: Bucket) -> None:
        """Update *bucket*, whose gradients are complete, if it can be updated now."""
        if not self._has_begun:
            self._take_up_states()
            self._has_begun = True
        if not all(fragment.weight.is_as_bound for fragment in bucket.fragments):
            return
        for fragment in bucket.fragments:
            _check_gradient(fragment.weight)
        if self._provisional is not None:
            self._provisional.came_by(bucket)
            if self._queue is None or self._queue.quiesce():
                if bucket.visits_device:
                    self._drain_after_backward()
                with self._clock.running():
                    self._update_provisionally(bucket)  # which `zero_grad` undoes
            return
        known(self._backward).begin_updates()
        if self._can_queue([bucket]):
            known(self._backward).note_norms(bucket)
            self._queue_updates([bucket])
        elif self._queue is None or self._queue.quiesce():
            if bucket.visits_device:
                self._drain_after_backward()
            else:
                known(self._backward).note_norms(bucket)
            with self._clock.running():
                self._update_now(bucket)
        else:
            return  # an earlier update has failed; `step` raises its error
        known(self._backward).spend(bucket)

    def _drain_after_backward(self) -> None:
        """Make this `backward` wait at its end until parameters in host memory have their new
        values.
        """
        task = torch._C._current_graph_task_id()
        if task == self._draining_task:
            return
        self._draining_task = task
        source = self._source

        def drain() -> None:
            optimizer = source()
            if optimizer is not None:
                # FSDP2 may reduce the gradients of another root after this.
                optimizer._draining_task = -1
                with optimizer._lock:
                    if optimizer._queue is None or optimizer._queue.quiesce():
                        optimizer._updater.drain()

        engine: Any = torch.autograd.Variable
        engine._execution_engine.queue_callback(drain)

    # The implementation of `overlap_step`.

    @property
    def state(self) -> Any:
        """The states, as in every optimizer. With `overlap_step` it waits for the updates."""
        self._settle()
        self._state_was_asked_for = True
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if "_template" not in self.__dict__:  # torch.optim.Optimizer makes an empty one
            return
        self._settle()  # pending updates would restore the old states
        self._state_was_asked_for = True
        self._state = value if isinstance(value, dict) else defaultdict(dict, value)

    @property
    def is_broken(self) -> bool:
        """Whether parameters and states are out of sync."""
        return bool(self._broken)

    def _due(self) -> list[Bucket]:
        """The buckets that have gradients and are not updated in this step yet."""
        if self._open_step is None or self._state_was_asked_for:
            self.synchronize()
            self._take_up_states()
        for weight in self._weights:
            weight.settle_gradient()
        due = [
            bucket
            for bucket in self._buckets
            if bucket not in self._updated and bucket.has_gradient
        ]
        if self._provisional is not None:
            due = self._provisional.in_order(due)
        self._bucketing.check(due)
        for weight in {fragment.weight for bucket in due for fragment in bucket.fragments}:
            _check_gradient(weight)
        return due

    def _can_queue(self, due: Sequence[Bucket]) -> bool:
        """Whether the updates of *due* can be made after the step has returned. The first updates
        cannot: they make the inner optimizers, and show which options these change.
        """
        if self._queue is None or self._changes_groups:
            return False
        if anything_is_compiled():
            self._tell_alone("torch.compile is used in this process")
            return False
        if torch.get_default_dtype() != torch.float32:  # it applies to the whole process
            self._tell_alone("torch.set_default_dtype has changed the default")
            return False
        gradients = [
            weight.parameter.grad
            for weight in {fragment.weight for bucket in due for fragment in bucket.fragments}
            if weight.parameter.grad is not None
        ]
        return (
            all(bucket.inner is not None for bucket in due)
            and all(map(can_be_awaited, gradients))
            and len(set(map(id, gradients))) == len(gradients)
        )

    def _queue_updates(self, due: Sequence[Bucket]) -> None:
        queue = known(self._queue)
        with queue.lock:
            self._progress.changing = True
            if self._open_step is None:
                self._open_step = Step(self, self._steps + 1, torch.get_num_threads(), callers())
            for bucket in due:
                for fragment in bucket.fragments:
                    self._watch_first_gradient(fragment.weight)
                options = self._options_of(bucket)
                self._open_step.given.update(options)
                queue.add(self._open_step, bucket, options)
                self._updated.add(bucket)
            self._progress.changing = False

    def _end_queueing(self) -> None:
        """Complete the queued updates of this step; its remaining updates are made in this call."""
        self.synchronize()
        if self._open_step is not None:
            self._options.left(self._open_step.left)
            self._open_step = None

    def _end_queued(self, step: Step) -> None:
        """All updates of *step* are queued: order them by the last order in which parameters were
        used. Updates that backward() usually makes come first, in its order.
        """
        queue = known(self._queue)
        uses, queue.uses = queue.uses, []
        if uses:
            self._uses = {
                weight: place for place, weight in enumerate(dict.fromkeys([*uses, *self._uses]))
            }
        never = len(self._uses)
        provisional = (
            None if self._provisional is None or self._provisional.rests else self._provisional
        )

        def place(bucket: Bucket) -> tuple[int, int]:
            used = min(self._uses.get(fragment.weight, never) for fragment in bucket.fragments)
            return 0 if provisional is None else provisional.place(bucket), used

        queue.waited_seconds = 0.0
        with queue.lock:
            self._progress.changing = True
            queue.end(step, place)
            self._open_step, self._backward_begins = None, True
            self._progress.changing = False

    def run_job(self, step: Step, bucket: Bucket | None, options: Options) -> None:
        """Make a queued update, in the thread of the queue. No other thread uses the swapper
        meanwhile.

        Parameters
        ----------
        step : Step
            The step of the update.
        bucket : Bucket or None
            The bucket to update. None ends the step.
        options : mapping
            The options of the groups of *bucket*, by index of the group.

        Raises
        ------
        OffloadError
            The drive failed. The job can be run again.
        """
        if self._job_progress.running:
            self._recover_job()
        self._job_progress.running = True
        if step.hints:
            self._tier.swapper.prefetch(step.hints)
            step.hints = []
        with self._clock.running():
            if bucket is not None:
                step.left.update(self._update(bucket, options, step.number - 1, self._job_progress))
                if bucket.visits_device:
                    self._updater.drain()  # the CPU uses the parameters next
                return
            self._updater.drain()
            self._tier.swapper.step()
            for index, key, value in differences(step.given, step.left):
                self._late.append((index, key, step.given[index].get(key), value))
        self._last = self._clock.end_step(step.number, **step.counts)

    def job_ended(self, error: BaseException | None) -> None:
        """The queue has recorded the end of the last job, or the *error* that ended it.

        Parameters
        ----------
        error : BaseException, optional
            The exception; None if the job is complete.
        """
        if error is None:
            self._job_progress.changing = self._job_progress.running = False
        elif self._job_progress.changing and not self._broken:
            self._broken = (
                f"a step failed in the midst of an update ({type(error).__name__}: {error})"
            )

    def _recover_job(self) -> None:
        """As `_recover`, before a failed job is run again."""
        self._tier.end_uses()
        if self._tier.interrupted and not self._broken:
            self._broken = "a call was interrupted"
        self._check_usable()
        self._updater.recover(self._buckets)

    def _watch_first_gradient(self, weight: Weight) -> None:
        """Complete pending updates when a backward pass begins: it may write to gradients, as DDP
        does through its buckets, which share their memory.
        """
        if weight in self._hooks or not weight.parameter.requires_grad:
            return
        source = self._source

        def first(_: torch.Tensor) -> None:
            optimizer = source()
            if optimizer is not None:
                optimizer._begin_backward()

        hooks: Any = torch.utils.hooks
        hooks.unserializable_hook(first)

        compiler: Any = torch.compiler
        parameter: Any = weight.parameter
        self._hooks[weight] = parameter.register_hook(compiler.disable(first))

    def _begin_backward(self) -> None:
        if self._backward_begins:
            self.synchronize()
            self._backward_begins = False

    def _changed_groups(self, keys: Sequence[str]) -> None:
        if keys and self._overlap and not self._changes_groups:
            self._changes_groups = True
            self._tell_alone(
                f"{self._class_name} changes {', '.join(keys)} of its groups in a step, which schedulers and programs read"
            )

    def _tell_alone(self, reason: str) -> None:
        if not self._told_alone:
            self._told_alone = True
            _log.warning("overlap_step is left out: %s", reason)

    def _give_up_what_fails(self) -> None:
        """Before states are loaded: wait for pending updates, and drop the ones that fail."""
        self._recover()
        try:
            self._settle()
        except Exception as error:
            _log.warning("updates are given up, since states are loaded: %s", error)
            if self._queue is not None:
                self._queue.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the optimizer is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken:
            raise UsageError(
                f"{self._broken}, so that parameters and states are no longer of one step: load both from a checkpoint"
            )


def _settling(source: weakref.ref[NVMeOptimizer]) -> Callable[[], None]:
    """A function that completes the pending updates of *source*, before `state` is used."""

    def settle() -> None:
        optimizer = source()
        if optimizer is not None:
            optimizer._settle()
            optimizer._state_was_asked_for = True

    return settle


def _check_class(parameter: torch.Tensor) -> None:
    if not can_be_awaited(parameter):
        raise UnsupportedError(
            f"overlap_step=True takes Parameters, plain tensors and DTensors, whose use can be made to wait, not {type(parameter).__name__}: "
            "leave it out, or use step_in_backward"
        )


def _check_gradient(weight: Weight) -> None:
    """Check that an update of *weight* can use its gradient. If the program has assigned another
    parameter's gradient in host memory, replace it by a copy: an update discards the bytes.
    """
    gradient = weight.parameter.grad
    if isinstance(gradient, HostGradient):
        gradient.held.check()
        if gradient.held.weight() is not weight:
            weight.parameter.grad = gradient = gradient.clone()
    if gradient is not None and gradient.layout is not torch.strided:
        raise UnsupportedError(
            "a gradient is sparse, which NVMeOptimizer does not take: make the embedding with sparse=False"
        )
