"""`Tiered`: what DeepSpeed's optimizers of all stages need to have their states in a tier."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist

from ..device.modes import outside_of_all_modes
from ..device.staging import CPU
from ..errors import OffloadError, UsageError, known
from ..io import archive
from ..optimizer_states.formats import FORMATS, StateFormat
from ..optimizer_states.widening import wide_enough
from ..sizes import Footprint
from ..swap.tier import Tier
from ..units import format_bytes
from . import compat, states
from .agreement import all_or_none, least, share_cores
from .cpu_adam import AdamPowers
from .gradients import Gradients, KeptGradients, LastGradients
from .optimizer_swapper import OptimizerSwapper, updates_packed
from .reader import MASTER
from .settings import Settings, tier_of, trained
from .sub_groups import element_bytes, states_of
from .updates import partly_applied, quiesce, unfinished_backward

if TYPE_CHECKING:
    from .in_backward import InBackward
    from .overlap import Overlap
    from .step_stats import StepClock

# DeepSpeed's AVX512 kernels for the CPU process 16 floats, unrolled 8 times, and round elements
# after the last whole vector of a tensor differently (csrc/adam/cpu_adam_impl.cpp).
VECTOR_ELEMENTS = 128
# Sub-groups prefetched in the first step, before the swapper has learned the order, and while a
# checkpoint is written.
PREFETCHED = 4

_log = logging.getLogger(__name__)


class Tiered:
    """The part of ZeRO's optimizers that is the same in all stages. A class derives from it first,
    and then from DeepSpeed's.

    Attributes: *partly_changed*, whether a step or a load has changed only some of the states;
    *swaps_natively*, whether optimizer states are in an `OptimizerSwapper`; *keeps_last*, whether
    "missing_gradients" is "last"; *leaves_states_offloaded*, whether a checkpoint is being written
    that streams states from the drive; *resumes*, whether engine.load_checkpoint is loading, to
    continue a run bit for bit (a load by `load_state_dict` has the bits of "device": "cpu").
    """

    # DeepSpeed's.
    optimizer: Any
    overflow: bool
    dynamic_loss_scale: Any
    fp32_partitioned_groups_flat: list[torch.Tensor]
    sub_group_to_group_id: dict[int, int]

    tier: Tier
    clock: StepClock
    # Set if optimizer states are.
    gradient_store: Gradients
    optimizer_swapper: OptimizerSwapper

    swaps_natively = False
    leaves_states_offloaded = False
    resumes = False
    partly_changed = False
    update_device = CPU
    overlap: Overlap | None = None
    in_backward: InBackward | None = None
    _partly_reduced = False  # a backward pass has reduced gradients and has not ended
    _awaits_backward = False  # no backward pass has ended since the last applied step
    _within_backward = False  # engine.backward has begun and has not ended
    _factor: Any = 1.0  # of the gradients in the step
    _gpu_bytes = 0.0  # for each element of a sub-group, if updates run on a GPU

    def _read_settings(self, ds_config: Mapping[str, Any]) -> None:
        """Begin the construction: DeepSpeed's constructor follows."""
        self._ds_config = ds_config
        self._settings = Settings.of(ds_config)
        self.state_format: StateFormat = FORMATS[self._settings.state_format]
        self.keeps_last = self._settings.missing_gradients == "last"
        self.powers = AdamPowers()
        self._steps_per_print = ds_config.get("steps_per_print", 10) or math.inf
        self._hooks: list[Any] = []  # handles of hooks of the module
        self._indexes: dict[int, int] = {}  # of sub-groups, by the id of their master weights
        self._tiers: list[Tier] = []  # of states and of parameters

    # Sub-groups and swapper.

    def _prepare_tier(self, open_tier: Callable[[], None]) -> None:
        """Call *open_tier*, and then `_plan` with the least memory of all ranks."""
        share_cores()
        all_or_none(open_tier)
        self.tier.cap_bytes = least(self.tier.cap_bytes)
        all_or_none(self._plan)

    def _plan(self) -> None:
        """Check that the budget of host memory is large enough. Raises: UsageError."""
        raise NotImplementedError

    def _footprint_of(self, gradient: torch.dtype, device: torch.device, **more: int) -> Footprint:
        """The host memory of updates, with gradients of the dtype *gradient*, and states of *device*."""
        base: Any = self
        masters, name = base.master_weights_and_grads_dtype, type(self.optimizer).__name__
        self.state_format = wide_enough(self.state_format, name, self.optimizer.param_groups)
        self.expected_states = states_of(self.optimizer, masters, device)
        kept, unpacked = element_bytes(
            self.state_format, self.expected_states, base.dtype, masters, name
        )
        return Footprint(
            states=kept,
            gradient=gradient.itemsize + (masters.itemsize if self.keeps_last else 0),
            scratch=masters.itemsize + unpacked,
            **{"parameter": 0, **more},
        )

    def _require_room(self, footprint: Footprint, sizes: list[int], largest: int) -> None:
        """Open the tier, and check that states and gradients of parameters of *sizes* fit in memory
        and on the drives if the largest sub-group has *largest* elements.
        """
        self._footprint, self._least_sub_group = footprint, largest
        self._whole_bytes = footprint.whole_bytes(sizes, largest)
        self.tier = tier_of(self._ds_config)
        quiesce(self.tier)
        self.tier.require_memory(self._whole_bytes)
        self.tier.require_space(footprint.drive_bytes(sum(sizes)))

    def _require_memory(self, sub_group: str) -> None:
        """Check that host memory can hold the largest *sub_group*. Raises: UsageError."""
        cap, fewest = self.tier.cap_bytes, self._footprint.least_bytes(self._least_sub_group)
        if cap < fewest:
            raise UsageError(
                f'"host_memory" of {format_bytes(cap)} cannot hold the optimizer states of {sub_group}: allow at least {fewest} bytes ({format_bytes(fewest)})'
            )

    def _make_swappers(self, numels: Sequence[int], gradient: torch.dtype) -> None:
        """Make the objects that keep states and gradients of sub-groups of *numels* elements."""
        base: Any = self
        self.tier.require(self._whole_bytes)
        largest = max(numels, default=0)
        last = LastGradients if self.update_device == CPU else KeptGradients
        self.gradient_store = (last if self.keeps_last else Gradients)(
            self.tier,
            numels,
            gradient,
            base.master_weights_and_grads_dtype,
            self.update_device,
            int(self._gpu_bytes * largest),
        )
        self.optimizer_swapper = OptimizerSwapper(
            self, largest, self._footprint.holds_in_flight(largest, self.tier.cap_bytes)
        )
        self.swaps_natively = True

    def _make_first_states(self, index: int) -> None:
        """Make the states that an optimizer has before its first step: only Adagrad has any."""
        if isinstance(self.optimizer, torch.optim.Adagrad):
            with self.in_memory(index, changed=True):
                parameter = self.fp32_partitioned_groups_flat[index]
                start = self.optimizer.defaults["initial_accumulator_value"]
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "sum": torch.full_like(parameter, start, requires_grad=False),
                }

    # The 16-bit weights of a sub-group, called with its flat master weights.

    def flat_weights(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The weights, if they are in one flat tensor."""
        raise NotImplementedError

    def present_weights(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The weights, if they are in one flat tensor on the device of updates."""
        flat = self.flat_weights(parameter)
        return flat if flat is not None and flat.device.type == self.update_device.type else None

    def copy_weights(self, parameter: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the weights to a flat tensor of any dtype on any device."""
        into.copy_(known(self.flat_weights(parameter)))

    def store_weights(self, parameter: torch.Tensor, source: torch.Tensor) -> None:
        """Make the contents of *source* the weights; it may be the result of `present_weights`."""
        weights = known(self.flat_weights(parameter))
        if weights.data_ptr() != source.data_ptr():
            weights.copy_(source)

    def _index_of(self, parameter: torch.Tensor) -> int:
        """The sub-group whose master weights are *parameter*."""
        known = len(self._indexes)  # the base class appends to the list while it makes masters
        for index, other in enumerate(self.fp32_partitioned_groups_flat[known:], known):
            self._indexes[id(other)] = index
        return self._indexes[id(parameter)]

    @property
    def groups_of_sub_groups(self) -> list[int]:
        """The index of the parameter group of each sub-group."""
        return [
            self.sub_group_to_group_id[index]
            for index in range(len(self.fp32_partitioned_groups_flat))
        ]

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        return True

    def swaps(self, index: int) -> bool:
        """Whether the states of sub-group *index* are in `optimizer_swapper`."""
        return self.swaps_natively and self._swappable_optimizer_subgroup(index)

    @contextlib.contextmanager
    def in_memory(
        self,
        index: int,
        *,
        changed: bool = False,
        renewed: Mapping[str, torch.dtype] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Context with the master weights (key "") and the states of sub-group *index* in memory, or with
        the states that `OptimizerSwapper.renew` makes for *renewed*. Changes are kept if *changed* is
        set, and after an exception.
        """
        parameter = self.fp32_partitioned_groups_flat[index]
        swapper = self.optimizer_swapper if self.swaps(index) else None
        try:
            if swapper is not None and renewed is None:
                swapper.swap_in_optimizer_state(parameter)
            elif swapper is not None:
                swapper.renew(parameter, known(renewed))
            yield {**self.optimizer.state.get(parameter, {}), MASTER: parameter.data}
        except BaseException:
            if swapper is not None:
                swapper.give_back()
            raise
        if swapper is not None and changed:
            swapper.swap_out_optimizer_state(parameter)
        elif swapper is not None:
            swapper.release_swap_buffers(parameter)

    def mark_backward(self, begins: bool) -> None:
        """`engine.backward` begins or ends; not called if the user calls `Tensor.backward`."""
        self._within_backward = begins
        if not begins:
            self._partly_reduced = False

    def read_ahead(self, index: int) -> None:
        """Prefetch the gradients and the states of sub-group *index* and the next ones."""
        names = (
            (
                self.gradient_store.name(number),
                self.optimizer_swapper.name(self.fp32_partitioned_groups_flat[number]),
            )
            for number in self._next_ones(index)[:PREFETCHED]
            if self._swappable_optimizer_subgroup(number)
        )
        self.tier.swapper.prefetch(itertools.chain.from_iterable(names))

    def _next_ones(self, index: int) -> Sequence[int]:
        """Sub-group *index* and the sub-groups that are probably used after it."""
        if self.overlap is not None and (later := self.overlap.following(index, PREFETCHED)):
            return later
        if self.in_backward is not None and self.in_backward.updating:
            return range(index, -1, -1)
        return range(index, len(self.fp32_partitioned_groups_flat))

    def destroy(self) -> None:
        """Drop the states; the base class drops its hooks. Raises: the error of the last updates,
        if they failed, after everything is dropped.

        Called from a `__del__`, such as the one of DeepSpeed's engine, it waits for no updates, and
        the next use of the tier drops the states: the garbage collector may run in the middle of
        another engine's call that holds the tier's locks.
        """
        if is_in_del():
            if self.overlap is None or not self.overlap.afterwards(self._drop):
                self._drop()
            return
        error = None
        if self.overlap is not None:
            error = self.overlap.abandon()
            self.overlap.stop(finish=False)
        self._drop()
        if self.swaps_natively:
            quiesce(self.tier)
            self.tier.forget(())  # drops abandoned values
        if error is not None:
            raise error

    def _drop(self) -> None:
        super().destroy()  # type: ignore[misc]
        while self._hooks:
            self._hooks.pop().remove()
        if self.swaps_natively:
            self.gradient_store.abandon()
            self.optimizer_swapper.abandon()
            self.tier.abandon((), [self._whole_bytes])
            self._whole_bytes = 0

    # Steps.

    def require_whole(self) -> None:
        """Raises: OffloadError if a step or a load has changed only some of the states."""
        if self.partly_changed:
            raise partly_applied()

    def _require_backward(self) -> None:
        """Raises: OffloadError unless a backward pass has ended since the last step."""
        if self._awaits_backward:
            raise OffloadError(
                "no backward pass has ended since the last step, which is only partly applied if an exception ended engine.step(): "
                "run a backward pass, or, after an exception, call load_checkpoint()"
            )
        self._require_no_backward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _require_no_backward(self, *_: Any) -> None:
        """Raises: OffloadError if gradients are left of a backward pass that an exception or another
        engine ended.
        """
        if torch.is_grad_enabled() and (self._partly_reduced or compat.lacks_reductions(self)):
            raise unfinished_backward()

    @outside_of_all_modes()
    def step(self, closure: Any = None) -> None:
        """Update the parameters, as the base class does. Every steps_per_print steps, log the time
        that the step spent on the drive.

        Raises: OffloadError if an exception ended the previous step or load after it had changed
        some states; loading a checkpoint clears this condition. With `"overlap_step"`, the error of
        the previous step's updates, if they failed.
        """
        self.finish_updates()
        self.require_whole()
        self._require_backward()
        # A second call would count the step twice, or repeat updates of backward.
        self.partly_changed = self._updates_in_backward
        try:
            self.clock.begin_update()
            pending = self._make_step(closure)
            if not (self.overflow or pending):
                self.end_period()
            waits = (0.0, 0.0) if self.overlap is None else self.overlap.take_waits()
            stats = self.clock.end(*waits)
            self._awaits_backward = True
            if not pending:
                self.partly_changed = False
        except BaseException:
            changed = self.partly_changed
            if self.overlap is not None:
                changed |= self.overlap.cancel()
            self.give_back()  # after updates, which clear the mark
            self.partly_changed |= changed
            raise
        if stats.step % self._steps_per_print == 0 and dist.get_rank() == 0:
            _log.info("%s", stats)

    def update(self, index: int, factor: Any, step: Callable[[], None]) -> None:
        """Update sub-group *index*, whose states are swapped, by *step*, with its gradient multiplied by
        *factor*.
        """
        parameter = self.fp32_partitioned_groups_flat[index]
        self.optimizer_swapper.give_back()
        self.partly_changed = True
        if not self.tier.swapper.learned:
            self.read_ahead(index)
        # Load the gradient before the states, so that only one value is in use at a time.
        gradient = self._last_gradient(index)
        packed = updates_packed(self.optimizer)
        self.optimizer_swapper.swap_in_optimizer_state(parameter, packed=packed)
        parameter.grad = gradient
        self._multiply_gradient(index, factor)
        step()
        if self.state_format.in_place:  # otherwise the swapper stores the weights
            self.store_weights(parameter, parameter.data)
        self.optimizer_swapper.swap_out_optimizer_state(parameter, async_swap=True)

    def step_sub_group(
        self, index: int, optimizer: Any, step: Callable[[], Any] | None = None
    ) -> None:
        """Make a step of *optimizer*, by its method or by *step*, over sub-group *index*, whose states
        are swapped in. Stages 1 and 2 have shown it one parameter group.
        """
        parameter, groups = self.fp32_partitioned_groups_flat[index], optimizer.param_groups
        group = groups[self.sub_group_to_group_id[index] if len(groups) > 1 else 0]
        multiplied = self.powers.multiplied if compat.keeps_powers_for_a_step() else None
        if self.optimizer_swapper.step(parameter, optimizer, group, multiplied):
            return
        group["params"] = [parameter]
        try:
            (step or optimizer.step)()
        finally:
            group["params"] = []
        self.optimizer_swapper.count_step(parameter)

    def _last_gradient(self, index: int) -> torch.Tensor:
        return self.gradient_store.widened(index, last=True)

    def _multiply_gradient(self, index: int, factor: Any) -> None:
        # Reading a factor on a GPU would wait for the GPU.
        if (torch.is_tensor(factor) and not factor.is_cpu) or factor != 1.0:
            known(self.fp32_partitioned_groups_flat[index].grad).mul_(factor)
            if self.swaps(index):
                self.gradient_store.used(index, factor)

    def _base_step(self, closure: Any) -> None:
        super().step(closure)  # type: ignore[misc]

    def _make_step(self, closure: Any) -> bool:
        """Make the base class's step. Returns: whether its updates are pending."""
        raise NotImplementedError

    @property
    def _updates_in_backward(self) -> bool:
        """Whether the last backward pass has updated sub-groups, and no step has followed."""
        return self.in_backward is not None and bool(self.in_backward.updated)

    def end_period(self) -> None:
        """End a period in which a step has used all values: the swappers learn their order."""
        for tier in self._tiers:
            tier.swapper.step()
            trained.add(tier)

    def finish_updates(self) -> None:
        """Wait until no update is pending, of this engine or of another that shares the memory.
        Raises: the error of this engine's updates, if they failed.
        """
        if self.overlap is not None:
            self.overlap.wait()
        quiesce(self.tier)

    def give_back(self) -> None:
        """Release everything that an interrupted call left in use, after pending updates."""
        if self.overlap is not None:
            self.overlap.quiesce()
        self.release_all()

    def release_all(self) -> None:
        """Release everything that is in use."""
        if self.swaps_natively:
            self.gradient_store.give_back()
            self.optimizer_swapper.give_back()
            self.optimizer_swapper.drain()

    # Checkpoints.

    def _forget_updates(self) -> None:
        """Prepare for a load of states: complete the pending updates, and forget failed ones."""
        if self.overlap is not None:
            self.overlap.begin_load()
        quiesce(self.tier)

    @outside_of_all_modes()
    def begin_load(self) -> None:
        """Release everything that an interrupted call left in use, and discard all gradients: they
        belong to weights that are about to be replaced.
        """
        self._forget_updates()
        if any(tier.interrupted for tier in self._tiers):
            self._reset_tiers()
        self.give_back()
        self._drop_gradients()
        if self.partly_changed or self.tier.swapper.lacks_writes():
            # Otherwise the load would raise the errors of failed writes midway.
            self.tier.swapper.flush()

    def _drop_gradients(self) -> None:
        compat.end_backward(self)
        if self.in_backward is not None:
            self.in_backward.end()
        self._partly_reduced = self._within_backward = self._awaits_backward = False
        base: Any = self
        base.reset_cpu_buffers()
        if self.swaps_natively:
            self.gradient_store.forget_all()

    def _reset_tiers(self) -> None:
        """Delete all values, which the load creates again."""
        self.partly_changed = True
        for tier in self._tiers:
            tier.reset()
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if self.swaps(index):
                self.optimizer.state.pop(parameter, None)
                with self.in_memory(index, changed=True, renewed={}):
                    pass

    def _restore_from_bit16_weights(self) -> None:
        """Set the master weights of all sub-groups from the 16-bit parameters; keep the states."""
        self._forget_updates()
        self.give_back()
        self.partly_changed = True
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            with self.in_memory(index, changed=True) as held:
                self.copy_weights(parameter, held[MASTER])
        self.partly_changed = False

    def _completed(self, tree: dict[str, Any]) -> dict[str, Any]:
        """*tree*, DeepSpeed's state dict, with the states that DeepSpeed does not save."""
        if powers := self.powers.state(self.optimizer):
            tree[states.POWERS] = powers
        if scaler := getattr(self, "torch_autocast_gradscaler", None):
            tree[states.SCALER] = scaler.state_dict()
        return tree if self.leaves_states_offloaded else archive.gather(tree)


def is_in_del() -> bool:
    """Whether this is called from a `__del__`, directly or indirectly.

    Only the stack shows it: a wrapper of DeepSpeed's engine may have a `__del__` that calls
    `destroy`, and engines outlive `zero3.disable`, which restores the engine's methods.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
