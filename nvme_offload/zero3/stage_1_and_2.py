"""`Stages1And2`: DeepSpeed's optimizer of ZeRO-1 and ZeRO-2 with master weights, optimizer states and
reduced gradients in a tier.

DeepSpeed flattens each parameter group, and every rank updates one partition of it. Here that
partition is cut into sub-groups, as in stage 3. The 16-bit weights stay where DeepSpeed keeps them.

The base class treats `"device": "nvme"` like `"device": "cpu"`. Here it makes its flat partitions
on the meta device. When it copies masters to weights, it copies the 16-bit partition onto itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..device.staging import CPU
from ..errors import UnsupportedError, UsageError
from . import compat, fragments, states
from .agreement import all_or_none
from .once_per_step import OncePerStep, one_step
from .reader import CheckpointReader, Saved, as_of_stage_3, in_flat_groups
from .replacing import replaced
from .step_stats import StepClock
from .sub_groups import is_elementwise
from .tiered import VECTOR_ELEMENTS, Tiered
from .updates import quiesce

_LEAST_SUB_GROUP = 4096  # elements; smaller sub-groups would cost more time than memory


class Stages1And2(Tiered, DeepSpeedZeroOptimizer):  # type: ignore[misc]  # untyped
    """DeepSpeed's optimizer of stages 1 and 2, with states in a tier."""

    single_partition_of_fp32_groups: list[torch.Tensor]
    averaged_gradients: dict[int, Any]
    _masters: list[torch.Tensor]  # while `state_dict` runs
    _is_planned = False  # whether the base class has made its partitions

    def __init__(
        self, ds_config: Mapping[str, Any], init_optimizer: Any, *args: Any, **named: Any
    ) -> None:
        self._read_settings(ds_config)
        # Ids of the parameters that have gradients from earlier micro-batches of the step.
        self._summed: set[int] = set()
        offload = named["offload_optimizer_config"].model_copy(update={"pin_memory": False})
        try:
            super().__init__(
                init_optimizer, *args, **{**named, "offload_optimizer_config": offload}
            )
        except BaseException:
            for hook in getattr(self, "_grad_acc_hooks", ()):
                hook.remove()  # autograd would keep this object alive indefinitely
            raise
        self._tiers = [self.tier]
        self.clock = StepClock(self.tier)

    @property
    def device(self) -> str:
        """The device on which the base class makes partitions of master weights."""
        return "cpu" if self._is_planned else "meta"

    @device.setter
    def device(self, value: str) -> None:
        pass

    def watch(self, module: torch.nn.Module) -> None:
        """Refuse forward passes of *module* after an exception has ended a backward pass."""
        self._hooks.append(module.register_forward_pre_hook(self._require_no_backward))

    # Sub-groups and swapper.

    def initialize_optimizer_states(self) -> None:
        """Make master weights, and the states that an optimizer has before its first step."""
        self._is_planned = True
        self._prepare_tier(self._open_tier)
        all_or_none(self._fill)

    def _open_tier(self) -> None:
        self.master_weights_and_grads_dtype = self.single_partition_of_fp32_groups[0].dtype
        # Whether the base class passes on sums of several micro-batches as gradients.
        sums_apart = self.use_grad_accum_attribute or any(
            compat.sums_on_accelerator(self, number) for number in range(len(self.bit16_groups))
        )
        self._gradient_dtype = self.gradient_accumulation_dtype if sums_apart else self.dtype
        self._can_cut = is_elementwise(self.optimizer)
        sizes = [int(size) for size in self.partition_size]
        largest = min(_LEAST_SUB_GROUP, max(sizes)) if self._can_cut else max(sizes)
        self._require_room(self._footprint_of(self._gradient_dtype, CPU), sizes, largest)

    def _plan(self) -> None:
        self._require_memory(f"a sub-group of {self._least_sub_group} elements")
        cap = self.tier.cap_bytes
        wanted = min(self._footprint.wanted_elements(cap), self._footprint.most_elements(cap))
        wanted = max(wanted // VECTOR_ELEMENTS * VECTOR_ELEMENTS, self._least_sub_group)
        # For each sub-group: its parameter group, and its first element and end in the partition.
        self.spans: list[tuple[int, int, int]] = []
        for group, size in enumerate(map(int, self.partition_size)):
            starts = range(0, size, wanted if self._can_cut else max(size, 1))
            self.spans += [(group, start, min(start + starts.step, size)) for start in starts]
        self.sub_group_to_group_id = {index: span[0] for index, span in enumerate(self.spans)}

    def _fill(self) -> None:
        self._make_swappers(self.fp16_partitioned_groups_flat_numel, self._gradient_dtype)
        self.fp32_partitioned_groups_flat = [
            torch.empty(
                0, dtype=self.master_weights_and_grads_dtype, device="cpu", requires_grad=True
            )
            for _ in self.spans
        ]
        for params in self.bit16_groups:
            for param in params:
                self.optimizer.state.pop(param, None)  # Adagrad's constructor makes states
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            self.optimizer_swapper.initialize_parameters([parameter], [self._weights(index)])
            self._make_first_states(index)
        self._clear_fp32_optimizer_param_groups()

    def flat_weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """See `Tiered`."""
        return self._weights(self._index_of(parameter))

    @property
    def fp16_partitioned_groups_flat_numel(self) -> list[int]:
        """The elements of each sub-group."""
        return [end - start for _, start, end in self.spans]

    @property
    def fp16_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The 16-bit weights of each sub-group. They share the memory of the model's parameters."""
        return [self._weights(index) for index in range(len(self.spans))]

    def _weights(self, index: int) -> torch.Tensor:
        group, start, end = self.spans[index]
        return self._own_weights(group)[start:end]

    def _own_weights(self, group: int) -> torch.Tensor:
        rank = dist.get_rank(group=self.real_dp_process_group[group])
        weights: torch.Tensor = self.parallel_partitioned_bit16_groups[group][rank].detach()
        return weights

    def _clear_fp32_optimizer_param_groups(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [
                self.fp32_partitioned_groups_flat[index] for index in self._of_group(number)
            ]

    def _of_group(self, number: int) -> list[int]:
        return [index for index, span in enumerate(self.spans) if span[0] == number]

    def pieces(self, group: int, start: int, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts, by sub-group, of *numel* elements from *start* in this rank's partition of
        *group*: the sub-group, the first element in it and among the *numel*, and their number.
        """
        for index, (number, first, end) in enumerate(self.spans):
            low, high = max(first, start), min(end, start + numel)
            if number == group and low < high:
                yield index, low - first, low - start, high - low

    def offload_states(self, *args: Any, **named: Any) -> None:
        """Raises: UnsupportedError."""
        raise UnsupportedError(
            "offload_states() moves states that are in memory, and this engine's states are on a drive: leave the call out"
        )

    # Gradients.

    def _add(
        self, param: Any, gradient: torch.Tensor, *, to_earlier: bool = False, completes: bool
    ) -> None:
        """Store *gradient*, this rank's part of *param*, and write the sum to it."""
        self._partly_reduced = True
        quiesce(self.tier)
        self.optimizer_swapper.give_back()
        self.gradient_store.partial = not compat.at_accumulation_boundary(self)
        group, _, start, numel = self.grad_position[self.get_param_id(param)]
        for index, offset, first, count in self.pieces(group, start, numel):
            piece = gradient.narrow(0, first, count)
            total = self.gradient_store.add(index, [(offset, piece)], to_earlier=to_earlier)[0]
            if to_earlier:
                piece.copy_(total)
            if completes:
                self.gradient_store.complete(index, [offset])
        # The base class may overwrite the gradient from another stream.
        if not get_accelerator().is_synchronized_device():
            get_accelerator().synchronize()

    def _own_part(self, param: Any) -> torch.Tensor:
        _, first, _, numel = self.grad_position[self.get_param_id(param)]
        gradient: torch.Tensor = self.get_param_gradient_attribute(param)
        return gradient.detach().view(-1).narrow(0, first, numel)

    def async_accumulate_grad_in_cpu_via_gpu(self, param: Any) -> None:
        """Add the sum of earlier micro-batches to the gradient of *param*, and store the result."""
        identifier = self.get_param_id(param)
        earlier = self.micro_step_id > 0 and (self.keeps_last or identifier in self._summed)
        self._add(param, self._own_part(param), to_earlier=earlier, completes=False)
        self._summed.add(identifier)

    def _restore_cpu_offload_grad_to_gpu(self, param: Any) -> None:
        """Set the gradient of *param* to the stored sum."""
        group, first, start, numel = self.grad_position[self.get_param_id(param)]
        restored = torch.zeros_like(param, dtype=self._gradient_dtype)
        flat = restored.view(-1).narrow(0, first, numel)
        for index, offset, begin, count in self.pieces(group, start, numel):
            self.gradient_store.read(index, offset, flat.narrow(0, begin, count))
        if self.use_grad_accum_attribute:
            param.grad_accum = restored
        else:
            param.grad = restored

    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, param: Any) -> None:
        """Store the gradient of *param* for the step."""
        self._add(param, self._own_part(param), completes=True)
        self.clear_grad_attribute(param)

    def copy_grads_in_partition(self, param: Any, *group: Any) -> None:
        """As in the base class, but sums on the accelerator are stored in the tier."""
        number = group[0] if group else None
        if number is None or not compat.sums_on_accelerator(self, number):
            super().copy_grads_in_partition(param, *group)
            return
        identifier = self.get_param_id(param)
        self._offload_accumulated_param_ids.add(identifier)
        if compat.at_accumulation_boundary(self):
            _, _, _, numel = self.grad_position[identifier]
            rank = dist.get_rank(group=self.real_dp_process_group[number])
            sums = self._get_compact_grad_partition_slice(number, rank, identifier, numel)
            self.norm_for_param_grads[identifier] = sums.double().norm(2)
            self.update_offload_overflow_tracker(sums)
            self._add(param, sums, completes=True)
            self.clear_grad_attribute(param)

    def independent_gradient_partition_epilogue(self) -> None:
        """The backward pass is over."""
        super().independent_gradient_partition_epilogue()
        self.gradient_store.pause()
        self._awaits_backward = self._partly_reduced = False

    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        """As in the base class. `step` calls this if no backward pass was reported to be the last."""
        super()._finalize_cpu_offload_gradient_accumulation()
        self.gradient_store.pause()
        self._partly_reduced = False

    def reset_cpu_buffers(self) -> None:
        """End the step, as in the base class. From now on its gradients are only read."""
        super().reset_cpu_buffers()
        self._summed.clear()
        self.gradient_store.spend()

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Store the factor by which the base class would multiply the gradients."""
        self._factor = _one()
        super().unscale_and_clip_grads([self._factor], total_norm)

    # The step.

    def _make_step(self, closure: Any) -> bool:
        self.partly_changed = bool(self.dynamic_loss_scale)
        with self._weights_as_masters():
            self._base_step(closure)
        if not self.overflow:
            self.powers.count(self.optimizer, self.groups_of_sub_groups)
        return False

    def _optimizer_step(self, group_no: int) -> None:
        group, indexes = self.optimizer.param_groups[group_no], self._of_group(group_no)
        try:
            with (
                replaced(self.optimizer, param_groups=[group]),
                one_step(self.optimizer, len(indexes)) as once,
            ):
                for index in indexes:
                    step = functools.partial(self._step_in_turn, once, index)
                    self.update(index, self._factor, step)
        finally:
            self._clear_fp32_optimizer_param_groups()

    def _step_in_turn(self, once: OncePerStep, index: int) -> None:
        with once.sub_group(0):
            self.step_sub_group(index, self.optimizer)
        if once.conflict:
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} computes {once.conflict!r} from all parameters together, and stages 1 and 2 on a drive update them "
                'one sub-group after another: use another optimizer, or set "device": "cpu"'
            )

    def _weights_as_masters(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the base class sees this rank's 16-bit weights as master weights."""
        weights = [self._own_weights(group) for group in range(len(self.bit16_groups))]
        return replaced(
            self,
            single_partition_of_fp32_groups=weights,
            param_buffer_of_bit16_for_cpu_offload_groups=weights,
        )

    def update_lp_params(self) -> None:
        """Set the 16-bit weights of all ranks from the master weights."""
        quiesce(self.tier)
        self.give_back()
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if self.state_format.in_place:
                with self.in_memory(index):
                    self._weights(index).copy_(parameter.data)
        self._gather()

    def _gather(self) -> None:
        with self._weights_as_masters():
            super().update_lp_params()

    # Fragments, for DeepSpeed's safe_get_* and safe_set_*.

    def _get_offload_gradient_dict(self) -> None:
        """Do nothing: the base class would make views of gradients in memory here."""

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Do nothing: the base class would make views of states in memory here."""

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        fragments.link(self)

    def note_gradients(self) -> None:
        """Record that the user has set gradients, which a step may use."""
        self._awaits_backward = False

    # Checkpoints.

    def _get_groups_without_padding(self, groups_with_padding: Any) -> list[torch.Tensor]:
        return self._masters

    def state_dict(self) -> dict[str, Any]:
        """As in the base class: one flat parameter for each parameter group."""
        quiesce(self.tier)
        self.require_whole()
        self.give_back()
        self._masters = []
        shown: dict[torch.Tensor, dict[str, Any]] = {}
        groups = zip(self.optimizer.param_groups, self._unpadded, strict=True)
        try:
            for number, (group, size) in enumerate(groups):
                master, state = states.joined(self, self._of_group(number), size)
                self._masters.append(master)
                flat = torch.empty(0, device="meta")
                if state:
                    shown[flat] = state
                group["params"] = [flat]
            with replaced(self.optimizer, state=shown):
                tree: dict[str, Any] = super().state_dict()
        finally:
            self._clear_fp32_optimizer_param_groups()
            del self._masters
        return self._completed(tree)

    def require_complete(self, saved: Mapping[str, Any]) -> None:
        """Raises: OffloadError if *saved* lacks states."""
        states.require_complete(self, saved, sum(self._unpadded), map(int, self.partition_size))

    def _drop_gradients(self) -> None:
        for param in itertools.chain.from_iterable(self.bit16_groups):
            param.grad = param.grad_accum = None
        super()._drop_gradients()
        self._release_ipg_buffers()
        self.micro_step_id = -1
        self.averaged_gradients = dict.fromkeys(self.averaged_gradients)

    def _load_legacy_checkpoint(
        self,
        state_dict_list: Sequence[Mapping[str, Any]],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
    ) -> None:
        tree = as_of_stage_3(state_dict_list[dist.get_rank(group=self.dp_process_group)])
        sizes = [master.numel() for master in tree[FP32_FLAT_GROUPS]]
        if sizes != self._unpadded:
            raise UsageError(
                f"the checkpoint has parameter groups of {sizes} elements for this rank, and the model has {self._unpadded}: "
                "it is from another model, other parameter groups, or another number of ranks"
            )
        saved = CheckpointReader(
            dist.get_world_size(group=self.dp_process_group),
            self._places(),
            lambda _: tree,
            partition_sizes=self.partition_size,
        )
        states.check(self, saved, True, load_optimizer_states)
        self.load(saved, load_optimizer_states, load_from_fp32_weights)

    def load(
        self, saved: CheckpointReader, load_optimizer_states: bool, from_fp32_weights: bool
    ) -> None:
        """Load *saved*, which has passed `states.check`; DeepSpeed has loaded the 16-bit weights.
        Without *from_fp32_weights*, master weights are set from those.
        """
        states.load(self, saved, load_optimizer_states)
        if not from_fp32_weights:
            self._restore_from_bit16_weights()
        if not self.state_format.in_place:
            self._gather()  # this rank may round its weights differently from the saved ones
        self.partly_changed = False

    def load_global_state(self, tree: Mapping[str, Any]) -> None:
        """Load the loss scale and other values that all sub-groups share."""
        self._load_global_state(tree)

    @property
    def trained_groups(self) -> list[list[Any]]:
        """The parameters of each parameter group."""
        groups: list[list[Any]] = self.bit16_groups
        return groups

    @property
    def _unpadded(self) -> list[int]:
        """The elements of this rank's partition of each parameter group that are not padding."""
        return [
            max(int(size) - padding, 0)  # older releases count the padding of all ranks
            for size, padding in zip(self.partition_size, self.groups_padding, strict=True)
        ]

    def _places(self) -> dict[str, Saved]:
        """The place of each parameter in its flat group."""
        return in_flat_groups(
            [
                {self.param_names[param]: param.shape for param in params}
                for params in self.round_robin_bit16_groups
            ],
            self.partition_size,
            getattr(self, "round_robin_bit16_padding", None),  # of newer releases
        )

    def shares(self, index: int) -> list[states.Share]:
        """The parts of parameters in sub-group *index*; an empty one if it has only padding."""
        places, (group, start, end) = self._places(), self.spans[index]
        rank = dist.get_rank(group=self.real_dp_process_group[group])
        low = rank * int(self.partition_size[group]) + start
        high = low + end - start
        found = []
        for param in self.round_robin_bit16_groups[group]:
            offset = places[self.param_names[param]].offset
            first, last = max(low, offset), min(high, offset + param.numel())
            if first < last:
                found.append(states.Share(param, first - offset, last - first, first - low))
        return found or [states.Share(param, 0, 0, 0)]

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Do nothing: DeepSpeed has loaded the 16-bit weights from the checkpoint."""


def _one() -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device="cpu")  # whatever the defaults are
