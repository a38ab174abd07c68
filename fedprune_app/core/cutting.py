"""Removal of groups of a matrix's inputs by a Hessian; the remaining weights compensate."""

import torch
from torch import Tensor

_STEPS = 64  # the most steps in which groups are removed; more change little


def cut_inputs(weight: Tensor, hessian: Tensor, size: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """Return the weights (out, in) with ``num_kept`` groups of inputs kept, and which inputs these are: bool (in,).

    A group is ``size`` neighbouring inputs. The diagonal of ``hessian`` (in, in) is raised by a hundredth of its mean.
    Each step removes the groups of least ``tr(W_G (H⁻¹_GG)⁻¹ W_Gᵀ)``, the error of their removal, and updates the
    other weights to the least squares ``min ‖(W - W₀) X‖²``. The result has the dtype of ``weight``. Raises
    ``ValueError`` for a Hessian that is not positive definite.

    Source: the optimal brain surgeon for groups, Hassibi and Stork, NeurIPS 1992; for a language model's heads and
    feed-forward units Kurtić, Frantar and Alistarh, "ZipLM", NeurIPS 2023, section 3. The method needs only the Hessian
    ``2/n Σ x xᵀ`` of a text, so a sum of clients' Hessians serves all of them.
    """
    num_inputs = weight.shape[1]
    num_groups = num_inputs // size
    damped_hessian = hessian.double().clone()
    damped_hessian.diagonal().add_(0.01 * damped_hessian.diagonal().mean())
    factor, failure = torch.linalg.cholesky_ex(damped_hessian)
    if bool(failure):
        raise ValueError("the Hessian is not positive definite")
    inverse, result = torch.cholesky_inverse(factor), weight.detach().double().clone()
    groups = torch.arange(num_inputs, device=weight.device).view(num_groups, size)
    step_size = max(1, -(-(num_groups - num_kept) // _STEPS))
    while len(groups) > num_kept:
        blocks = inverse[groups[:, :, None], groups[:, None, :]]  # (groups, size, size)
        parts = result[:, groups].movedim(1, 0)  # (groups, out, size)
        errors = (torch.linalg.solve(blocks, parts, left=False) * parts).sum((1, 2))
        order = errors.argsort(stable=True)
        count = min(step_size, len(groups) - num_kept)
        inputs, groups = groups[order[:count]].flatten(), groups[order[count:].sort().values]
        coefficients = torch.linalg.solve(inverse[inputs][:, inputs], inverse[inputs])  # (inputs, in)
        result -= result[:, inputs] @ coefficients
        inverse = inverse - inverse[:, inputs] @ coefficients
        result[:, inputs] = 0
    is_kept = torch.zeros(num_inputs, dtype=torch.bool, device=weight.device)
    is_kept[groups.flatten()] = True
    return torch.where(is_kept, result, 0).to(weight.dtype), is_kept
