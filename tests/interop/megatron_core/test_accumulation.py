"""Weight gradients beside autograd: what follows a layer may write to its output, as Megatron's loss does."""

import pytest
import torch

from tpkernels.interop.megatron_core.accumulation import AddToMainGrad, KeepForLater


def product(how, x, weight, main_grad, kept):
    y = x @ weight.detach().t()
    if how is AddToMainGrad:
        return AddToMainGrad.apply(y, weight, x.detach(), main_grad)
    return KeepForLater.apply(y, weight, kept)


@pytest.mark.parametrize("how", [AddToMainGrad, KeepForLater])
def test_the_output_may_be_written_to(how):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    plain = torch.autograd.grad((x @ weight.t() - 2).exp().sum(), [x, weight])
    main_grad, kept = torch.zeros(3, 4), []
    y = product(how, x, weight, main_grad, kept)
    y.sub_(2)
    (dx,) = torch.autograd.grad(y.exp().sum(), x)
    torch.testing.assert_close(dx, plain[0])
    found = main_grad if how is AddToMainGrad else kept[0].t() @ x.detach()
    torch.testing.assert_close(found, plain[1])
