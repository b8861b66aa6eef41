"""Megatron's attributes stay on parameters, whatever torch does to a module."""

import copy
import pickle
from inspect import getattr_static

import pytest
import torch
from torch import nn

from tests.fake_world import each_rank, fake_rank
from tests.layers.worlds import posing
from tpkernels import initialize_model_parallel
from tpkernels.layers.attributes import (
    Attributes,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from tpkernels.layers.parallel_module import ParallelModule

SPLIT = Attributes(True, 1, 2)
MARKED = Attributes(sequence_parallel=True)


class Two(ParallelModule):
    """Parameters enough to lose attributes of."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__(None)
        self.add_parameter("weight", (2, 3), SPLIT, device=device, dtype=None)
        self.add_parameter("scale", (3,), MARKED, device=device, dtype=None)
        self.register_parameter("bias", None)


def says(module: nn.Module, scale: Attributes = MARKED) -> bool:
    return Attributes.of(module.weight) == SPLIT and Attributes.of(module.scale) == scale


def test_a_parameter_says_how_it_is_split_and_who_has_the_other_shards():
    with posing(1, 2):
        two, plain = Two(), nn.Parameter(torch.zeros(2))
        set_tensor_model_parallel_attributes(plain, True, 0, 1)
        master = torch.zeros(2)
        copy_tensor_model_parallel_attributes(master, plain)
        for parameter in (two.weight, two.scale, copy.deepcopy(two).half().weight, plain, master):
            assert parameter.tensor_parallel_ranks == (0, 1)
    assert two.weight.tensor_model_parallel is True
    assert (two.weight.partition_dim, two.weight.partition_stride) == (1, 2)
    assert two.weight.sequence_parallel is False


def test_torch_compile_takes_no_module_for_one_of_fsdp_before_it_is():
    """It looks with `getattr_static`, since torch 2.14, which would find a property."""
    with posing(1, 2):
        two = Two()
        assert getattr_static(two, "_is_fsdp_managed_module", False) is False
        two._parameters["weight"] = nn.Parameter(torch.zeros(2, 3))
        two._is_fsdp_managed_module = True  # as `fully_shard` does, after new parameters
        assert getattr_static(two, "_is_fsdp_managed_module", False) is True
        assert says(two)


def test_a_loaded_parameter_says_who_has_them_now():
    with fake_rank(3, 4):
        initialize_model_parallel(2)
        saved = pickle.dumps(Two())
        assert pickle.loads(saved).weight.tensor_parallel_ranks == (2, 3)
    with fake_rank(1, 4):
        initialize_model_parallel(2)
        assert pickle.loads(saved).weight.tensor_parallel_ranks == (0, 1)


CHANGES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "to another dtype": lambda module: module.to(torch.float64),
    "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "within a container": lambda module: copy.deepcopy(nn.Sequential(module)).half()[0],
    "load by assignment": lambda module: (
        module.load_state_dict(
            {name: torch.ones_like(p) for name, p in module.named_parameters()}, assign=True
        )
        and module
    ),
    "another parameter": lambda module: setattr(module, "weight", nn.Parameter(torch.ones(2, 3))) or module,
    "requires_grad": lambda module: module.requires_grad_(False),
}


OF_MEGATRON = {"allreduce": False, "expert_tp": True, "is_qkv": True, "qkv_split_shapes": [4, 2, 2]}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("swap", [False, True])
def test_attributes_survive_and_so_does_what_megatrons_optimizers_read(change, swap):
    outside = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        with posing(1, 2):
            assert says(change(Two()))
            changed_by_hand = Two()
            changed_by_hand.scale.sequence_parallel = False
            assert says(change(changed_by_hand), Attributes())
            vars(changed_by_hand.scale).update(OF_MEGATRON)
            changed = change(changed_by_hand)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(outside)
    assert {name: getattr(changed.scale, name) for name in OF_MEGATRON} == OF_MEGATRON


def test_setting_twice_is_setting_once():
    weight = torch.ones(2, 2)
    for _ in range(2):
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
    assert Attributes.of(weight) == Attributes(True, 0, 1)
    with pytest.raises(ValueError, match=r"expected 0, with which this tensor is marked already, got 1"):
        set_tensor_model_parallel_attributes(weight, True, 1, 1)


def test_defaults_and_copies():
    weight, copied = torch.ones(2), torch.ones(2)
    set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
    assert weight.tensor_model_parallel is False
    assert (weight.partition_dim, weight.partition_stride) == (-1, 1)
    set_tensor_model_parallel_attributes(copied, True, 0, 3)
    copy_tensor_model_parallel_attributes(weight, copied)
    set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
    assert Attributes.of(weight) == Attributes(True, 0, 3)
    vars(copied).update(OF_MEGATRON)
    copy_tensor_model_parallel_attributes(weight, copied)
    assert {name: getattr(weight, name) for name in OF_MEGATRON} == OF_MEGATRON


def test_copies_are_counted_once():
    split, whole = torch.ones(2), torch.ones(2)
    set_tensor_model_parallel_attributes(split, True, 0, 1)
    for rank in each_rank(2):
        initialize_model_parallel(2)
        assert param_is_not_tensor_parallel_duplicate(split)
        assert param_is_not_tensor_parallel_duplicate(whole) == (rank == 0)


def test_a_tied_parameter_keeps_what_is_said_of_it():
    with posing(1, 2):
        owner, borrower = Two(), Two()
        owner.scale.sequence_parallel = False
        borrower.scale = owner.scale
        for module in (owner, borrower):
            assert says(module, Attributes())
