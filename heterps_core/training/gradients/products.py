"""Matrix products of fully connected layers, by oneDNN where it is faster than torch's own.

Torch takes MKL, which uses half of the vector units of processors that are not Intel's: from 1 M multiplications on
oneDNN is 1.5 to 2.1 times as fast on AMD EPYC, in all three products of a layer. Each of its calls takes 14
microseconds more, so small products are torch's (`python -m tests.benchmarks training_speed`).

Shapes: B rows, I and O inputs and outputs of a layer.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_MULTIPLICATIONS, _LEAST_ELSEWHERE = 1_000_000, 300_000_000
"""The second for float32 on processors that are not AMD's: on Intel up to 2,048 rows of 400 x 400 gained nothing."""


def linear(input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, activation: str) -> Tensor:
    """Return what leaves a layer and its activation function, "none", "relu" or "sigmoid" [B, O].

    oneDNN adds bias and activation without a further pass over memory.
    """
    if takes_onednn(input_BI, weight_OI):
        return _by_onednn(input_BI, weight_OI, bias_O, activation)
    output_BO = F.linear(input_BI, weight_OI, bias_O)
    return {"none": lambda: output_BO, "relu": output_BO.relu, "sigmoid": output_BO.sigmoid}[activation]()


def add_weight_gradient(weight_OI: Tensor, gradient_BO: Tensor, input_BI: Tensor) -> None:
    """Add the gradient of a weight, which follows from that of the layer's output and its input."""
    gradient_OB, grad = gradient_BO.t(), weight_OI.grad
    if gradient_BO.dtype is torch.float32 and _is_amd() and takes_onednn(gradient_OB, input_BI.t()):
        # Rows of a packed activation lie apart, for which oneDNN has no kernel: 1.7 s for 512 x 400 x 400, not 2 ms.
        product = _by_onednn(gradient_OB.contiguous(), input_BI.contiguous().t(), None, "none")
    elif gradient_BO.dtype is torch.float32 and grad is not None:
        grad.addmm_(gradient_OB, input_BI)
        return
    else:
        product = torch.mm(gradient_OB, input_BI).float()
    weight_OI.grad = product if grad is None else grad.add_(product)


def takes_onednn(left: Tensor, right: Tensor) -> bool:
    """Return whether oneDNN is the faster one for a product of left [B, I] and right [I, O] or [O, I]."""
    gains_early = _is_amd() or left.dtype is not torch.float32
    least = _LEAST_MULTIPLICATIONS if gains_early else _LEAST_ELSEWHERE
    return left.shape[0] * right.numel() >= least and left.device.type == "cpu" and _has_onednn(left.dtype)


def _by_onednn(input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input_BI, weight_OI, bias_O, activation, [], "")  # type: ignore[no-any-return]


@functools.cache
def _has_onednn(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN can multiply in that type on this processor; the operation is torch's own, for Inductor."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")
