"""All test inputs that torch has for its optimizers: the plain optimizer's bits with one
bucket and with many, or refused by name.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from reference import differing, parameters, smallest, train

from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer

SHAPES = [(40, 30), (80, 70), (64, 64)]  # one of which is cut
# as `optim_db`, whose import takes seconds, has them
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)
REFUSED = {"LBFGS", "SparseAdam"}
CPU = torch.device("cpu")


def made(params, kind, options, **offload):
    if offload:
        return NVMeOptimizer(params, kind, **offload, **copy.deepcopy(options))
    return kind(params, **copy.deepcopy(options))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_inputs(tmp_path, name):
    pytest.importorskip("expecttest", reason="torch's test inputs need expecttest")
    from torch.testing._internal.common_optimizers import optim_db

    infos = {info.optim_cls.__name__: info for info in optim_db}
    assert sorted(infos) == NAMES
    info = infos[name]
    kind = info.optim_cls
    inputs = info.optim_inputs_func(device=CPU)
    options = [
        one.kwargs
        for one in inputs
        if not (one.kwargs.get("capturable") or one.kwargs.get("differentiable"))
    ]
    assert options
    flags = [
        {},
        *(
            {flag: True}
            for flag in ("foreach", "fused")
            if flag in info.supported_impls
            and CPU.type in getattr(info, "supports_fused_on", ("cpu",))
        ),
    ]
    several = 0
    for given in [
        {**one, **flag}
        for one in options
        for flag in flags
        if not (flag and one.keys() & flag.keys())
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind.__name__ in REFUSED:
                with pytest.raises(UnsupportedError, match=kind.__name__):
                    made(parameters(shapes=SHAPES), kind, given, paths=tmp_path)
                continue
            plain = parameters(shapes=SHAPES)
            train(plain, made(plain, kind, given))
            one = parameters(shapes=SHAPES)
            with made(one, kind, given, paths=tmp_path) as optimizer:
                train(one, optimizer)
            many = parameters(shapes=SHAPES)
            with smallest(
                lambda cap, many=many, given=given: made(
                    many, kind, given, paths=tmp_path, host_memory=cap
                )
            ) as optimizer:
                several = max(several, len(optimizer._steps.binding.buckets))
                train(many, optimizer)
        assert differing(one, plain) == [], given
        assert differing(many, plain) == [], given
    assert kind.__name__ in REFUSED or several > 2
