"""`NVMeOptimizer`: a `torch.optim.Optimizer` whose states are on a drive."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from ..errors import UnsupportedError, UsageError
from ..hardware.config import AioConfig
from ..optimizer_states.formats import state_format as format_called
from ..optimizer_states.widening import wide_enough
from ..swap.tier import open_tier
from . import files, parts, saved
from .binding import check_resized, parameters_of
from .buckets import Weight
from .forwarding import Forwarding
from .modes import fixed_modes
from .options import (
    Maker,
    UpdateDevice,
    When,
    follow,
    materialised,
    require_flags,
    samples_of,
)
from .stats import UpdateStats
from .steps import Steps

_serials = itertools.count()


class NVMeOptimizer(Forwarding):
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
        between: clipping by a norm, GradScaler, DDP; and changes of options, gradients or
        parameters in between. To accumulate, run all but the last `backward` under `no_sync`. With
        several processes it takes DTensors (FSDP2, tensor parallelism); "local" takes any parameter,
        and asserts that only autograd and FSDP2 work on gradients.

        "provisional" keeps gradients and the old parameters until `step`, which makes updates again
        whose gradients were changed since, such as by clipping. The bits are the same as with
        updates after `backward`. The drive needs up to twice the room, for old and new states.
        `zero_grad` without a `step`, or reading states, undoes all updates. Between `backward` and
        `step` parameters have their new values; one to which the program writes then keeps the
        written values.
    overlap_step : bool
        `step` returns immediately. A thread makes its updates concurrently with later work, usually
        the forward pass, in the order in which that pass uses parameters. The bits do not change:
        the first use of a parameter waits for its update, and so do `state`, `state_dict`, `stats`
        and every method but `zero_grad`. `synchronize` lists the uses that do not wait.
    accumulate : {None, "host"}
        "host" adds each gradient in host memory as soon as `backward` has computed it; `.grad` has
        a placeholder. Gradients share *host_memory* with the states, and spill to the drive. The
        bits are the same as with accumulation in `.grad`. `step` uses the gradients up: call
        `zero_grad` before the next `backward`. Not together with *step_in_backward*,
        *overlap_step*, or DTensors.
    update_device : {"auto", "gpu", "cpu"}
        Where parameters in host memory are updated. "auto" is the GPU for parameters with which
        FSDP2 computes on a GPU (CPUOffloadPolicy), if the GPU has 1 GiB free, and the CPU for all
        others. "gpu" is the current CUDA device for all. *optimizer_class* on that device gives the
        same bits.
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
    As in torch, a model may be sharded, moved or cast after its optimizer was made, and `param_groups`
    may get other parameters at any time. Lifetime: `close`, the end of a ``with`` or the garbage
    collection of the optimizer frees memory and space on the drives.

    `state` has small values, and placeholders for all others. Reading a placeholder copies its values;
    writing to it, replacing it or removing it takes effect immediately or before the next step.
    Changing a 16-bit parameter in place between steps changes its master, too.

    After a step that raised, as with an error of the drive or Ctrl-C, some parameters are updated and
    others are not. `step` with the same gradients updates only the remaining parameters; `zero_grad`
    drops the rest of that step. After an exception in the middle of a change, `step` raises UsageError
    until weights and states are loaded from a checkpoint; the same object can load them.
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
        require_flags(overlap_step=overlap_step, elementwise=elementwise, masters=masters)
        when = When(step_in_backward, bool(overlap_step), accumulate)
        given = materialised(params)
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        samples = samples_of(given)
        if not callable(optimizer_class):
            raise UsageError(
                f"optimizer_class must be a class, such as torch.optim.AdamW, not {optimizer_class!r}"
            )
        template = optimizer_class(samples, **kwargs)
        if not isinstance(getattr(template, "param_groups", None), list):
            raise UnsupportedError(
                f"{name} cannot be used with NVMeOptimizer: it has no param_groups, as torch's optimizers have"
            )
        super().__init__(given, dict(template.defaults))
        follow(self.param_groups, template.param_groups)
        keeps = dataclasses.replace(format_called(state_format), keeps_masters=bool(masters))
        self._format = wide_enough(keeps, name, self.param_groups)
        self._class_name = name
        self._serial = next(_serials)
        self._loads = 0
        self._maker = Maker(
            optimizer_class, kwargs, self.param_groups, in_groups=isinstance(samples[0], dict)
        )
        tier = open_tier(paths, host_memory, aio, "NVMeOptimizer")
        try:
            self._steps = Steps(
                self,
                when,
                tier,
                self._format,
                self._maker,
                name,
                f"optimizer{self._serial}",
                declared=elementwise,
                place_updates=place_updates,
            )
            self._steps.bind_or_wait()
        except BaseException:
            tier.close()
            raise
        self._template = template

    # The interface of torch.optim.Optimizer.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients; return the result of *closure*.

        With `overlap_step` it queues the updates, and raises the error of earlier ones that have
        failed. A repeated call tries these again, and makes a new step only if there are other
        gradients.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again, with gradients, before the update.

        Raises
        ------
        UsageError
            The optimizer is closed, or parameters and states are out of sync. With
            `step_in_backward=True`: options, gradients or parameters were changed after `backward`.
        OffloadError
            The drive failed. `step` may be called again.
        """
        return self._steps.make(closure)

    def synchronize(self) -> None:
        """With `overlap_step`: return when all updates are made; on a GPU, when later work of the
        current stream is ordered after them. Otherwise, and if no update is pending, do nothing.
        Raises: OffloadError if the drive failed; call it again to continue with the remaining
        updates.

        Call it before parameters, their gradients or states are used in a way that does not wait:
        through other tensors that share their memory and were made before the step, in C++
        extensions and functions of TorchScript that receive a parameter, by
        `torch.as_tensor(parameter)` and the like, and in CUDA graphs. Call it also before
        process-wide settings, such as the default dtype, change.
        """
        if "_steps" in self.__dict__:
            self._steps.synchronize()

    @fixed_modes()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`. Parameters that an unfinished step has not updated
        yet stay unchanged.

        Parameters
        ----------
        set_to_none : bool
            Drop gradients; False fills them with zeros.
        """
        self._steps.give_up()
        super().zero_grad(set_to_none)
        self._steps.zero(set_to_none=set_to_none)

    @fixed_modes()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`. If it raises, nothing is changed.

        Parameters
        ----------
        param_group : dict
            "params", and options that differ from the defaults.

        Raises
        ------
        UsageError, UnsupportedError, NoSpaceError
            A parameter is in another group already, or as when the optimizer is made.
        """
        if "_steps" not in self.__dict__:
            super().add_param_group(param_group)
            return
        steps = self._steps
        steps.settle()
        steps.recover()
        if steps.binding.weights:
            steps.bind()  # errors of this call do not concern the new group
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
            steps.bind_or_wait()
        except BaseException:
            groups.pop()
            del samples[before:]
            steps.options.forget([len(groups)])
            raise

    def state_dict(self) -> dict[str, Any]:
        """States and options in the format of the plain optimizer, which can load them.

        States of 16-bit parameters have a "master" in addition. "nvme_offload", next to "state" and
        "param_groups", says how states are kept. The parameters may have moved to another device
        since the last step. Tensors are copies on the CPU, mapped from a file on the first drive:
        they take memory as they are read, and the kernel can reclaim it. To change states, change
        `state`, or load the changed dictionary.

        Raises
        ------
        UsageError
            The optimizer is closed, or in the middle of a step.
        NoSpaceError
            The first drive has no room for the file.
        """
        collect = functools.partial(saved.collect, directory=self._steps.tier.paths[0])
        with self._packed(collect) as tree:
            return tree

    def save(self, path: str | os.PathLike[str], *, group: Any = None) -> None:
        """Write states and options to *path*, as they are kept: states of 8 bits take 8 bits, and
        masters take the bits that their weights lack.

        It has a few buckets in memory at a time. The states replace older ones at *path*
        completely, or not at all. *state_format* may be another one when they are loaded.

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
        NoSpaceError, IOFailure
            There is no room for the file, a directory cannot be created, or a drive failed.
        OffloadError
            Another rank failed; the message gives its error.
        """
        steps = self._steps
        steps.health.check_open()
        with contextlib.suppress(Exception):  # `_packed` raises it, where ranks exchange errors
            steps.bind(lazily=True)
        # equal on all ranks if ranks that train together save together
        moment = [self._serial, self._loads, steps.count]
        states = functools.partial(self._packed, saved.as_kept)
        files.save(states, Path(path), steps, moment, group)

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
            The states belong to other parameters, or to another rank's part. Nothing is changed.
        UnsupportedError
            Another number of ranks saved them, and their parameters are plain tensors; or a later
            release did.
        CorruptionError
            A file differs from the file that was written. Nothing is changed.
        OffloadError
            The drive failed, or another rank did. Load again before the next step.
        """
        steps = self._steps
        steps.health.check_open()
        steps.give_up_what_fails()
        with contextlib.suppress(Exception):  # raised below, where ranks exchange errors
            steps.bind()
        with steps.states.files as mapped:
            read = functools.partial(files.read, mapped=mapped, weights_only=weights_only)
            files.load(Path(path), steps, group, read, self._check_loadable, self.load_state_dict)

    @contextlib.contextmanager
    def _packed(self, collect: Callable[..., list[dict[Any, Any]]]) -> Iterator[dict[str, Any]]:
        """A state dict with the states that *collect* returns, which do not change in the context."""
        steps, states = self._steps, self._steps.states
        if steps.binding.weights or any(dict.values(states.shown)):
            steps.bind(lazily=True)
        with steps.between_steps():
            check_resized(steps.binding.weights, states.shown, self.param_groups)
            shown = states.shown

            def show(_: torch.optim.Optimizer) -> None:
                states.take_up()
                weights = steps.binding.weights
                found = collect(steps.updater, steps.binding.buckets, weights)
                pairs = zip(weights, found, strict=True)
                states.shown = defaultdict(
                    dict, {one.parameter: state for one, state in pairs if state}
                )

            handle = self.register_state_dict_pre_hook(show)  # after the program's hooks
            try:
                packed: dict[str, Any] = super().state_dict()
            finally:
                handle.remove()
                states.shown = shown
            kept: dict[str, Any] = {
                "version": saved.VERSION,
                "state_format": self._format.name,
                "steps": steps.count,
            }
            if steps.updater.wide:
                kept["wide"] = True
            if (part := parts.part_of(steps.binding.weights)) is not None:
                kept["part"] = part
            yield {**packed, "nvme_offload": kept}

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
        UnsupportedError
            A later release has saved it. Nothing is changed.
        OffloadError
            The drive failed. Load it again before the next step.
        """
        steps = self._steps
        steps.give_up_what_fails()
        loaded: dict[Weight, dict[str, Any]] = {}
        kept: Mapping[str, Any] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            nonlocal kept
            loaded.update(self._check_loadable(given))
            kept = saved.told(given)
            return {**given, "state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            for group in self.param_groups:
                for key, value in self.defaults.items():
                    # torch adds "differentiable" to the defaults of every optimizer that loads
                    if key in self._template.defaults:
                        group.setdefault(key, value)
            count = kept.get("steps") or max(map(saved.steps, loaded.values()), default=0)
            steps.load(loaded, count, wide=bool(kept.get("wide")))
            self._loads += 1

        with steps.lock:
            steps.health.check_open()
            if steps.binding.weights or state_dict.get("state"):
                steps.bind()
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
        weights = self._steps.binding.weights
        parts.check_part(saved.told(given).get("part"), weights)
        groups = given["param_groups"]
        indices = [index for group in groups for index in group["params"]]
        found = {}
        # the base class raises if the lengths differ
        for weight, index in zip(weights, indices, strict=False):
            found[weight] = given["state"].get(index, {})
            saved.check(found[weight], weight)
        if len(groups) == len(self.param_groups):  # otherwise the base class raises
            self._steps.bucketing.check_keys(
                found, [{**self.defaults, **group} for group in groups]
            )
        return found

    @fixed_modes()
    def __setstate__(self, state: dict[str, Any]) -> None:
        self._steps.settle()
        given = dict(state)
        if "state" in given:
            self.state = given.pop("state")
        super().__setstate__(given)

    @property
    def state(self) -> Any:
        """The states, as in every optimizer. With `overlap_step` it waits for the updates."""
        self._steps.settle_for_use()
        return self._steps.states.shown

    @state.setter
    def state(self, value: Any) -> None:
        if "_steps" in self.__dict__:  # torch.optim.Optimizer makes an empty one
            self._steps.settle_for_use()  # pending updates would restore the old states
            states = self._steps.states
            states.shown = value if isinstance(value, dict) else defaultdict(dict, value)

    # In addition to that interface.

    def stats(self) -> UpdateStats:
        """Transfers and waits of the last step. With `overlap_step` it waits for the updates.

        Raises
        ------
        UsageError, OffloadError
            There was no step yet; as `synchronize`.
        """
        self.synchronize()
        if self.last_stats is None:
            raise UsageError("this optimizer has made no step yet")
        return self.last_stats

    @property
    def last_stats(self) -> UpdateStats | None:
        """`stats` of the last step whose updates are all made; None before the first. Never waits."""
        return self._steps.last_stats

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """With `step_in_backward`: accumulate gradients, without updates, in the context."""
        backward = self._steps.backward
        before, backward.accumulating = backward.accumulating, True
        try:
            yield
        finally:
            backward.accumulating = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, for all of the optimizer's gradients, also in host
        memory.

        Parameters
        ----------
        max_norm : float
            Upper limit of the norm of the gradients.
        norm_type : float
            Order of the norm; ``inf`` for the largest element.
        error_if_nonfinite : bool
            Raise RuntimeError if the norm is infinite or not a number.
        """
        parameters = [parameter for _, parameter in parameters_of(self.param_groups)]
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite
        )
        return norm

    @fixed_modes()
    def close(self) -> None:
        """Free memory and space on the drives. A second call does nothing. Raises: with
        `overlap_step`, the error of the last updates; the optimizer is closed nevertheless.
        """
        self._steps.close()

    def __enter__(self) -> NVMeOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "an NVMeOptimizer cannot be copied, as its states are on a drive: make another one, and load this one's state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "an NVMeOptimizer cannot be pickled, as its states are on a drive: save its state_dict()"
        )
