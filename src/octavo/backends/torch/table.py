"""What the torch backend runs, and how it stores parameters.

Rule: no torch here; a plan can be made and priced on a machine that has none.
"""

from __future__ import annotations

from octavo.program.ir import MoE, Op, Weight
from octavo.program.planner import Kernel, Limits, Unserved
from octavo.quantization.formats import GROUP, Format


class TorchKernelTable:
    """Serves every op. quantized: keep quantised weights as they are and compute in their arithmetic;
    else dequantise to f32."""

    name = "torch"

    def __init__(self, *, quantized: bool) -> None:
        self.quantized = quantized

    def choose(self, op: Op, limits: Limits) -> Kernel:
        """One kernel an op, named after it; quantised experts are not served. Temporaries are torch's."""
        del limits
        if isinstance(op, MoE) and self.quantized and any(w.format.quantized for w in op.weights):
            raise Unserved("experts have no quantised arithmetic here")
        return Kernel(f"torch.{op.kind}")

    def weight_nbytes(self, weight: Weight) -> int:
        """Plain, or int8 with f32 scales (and mins) per group."""
        elements = 1
        for size in weight.shape:
            elements *= size
        if not weight.format.quantized:
            return weight.format.element_nbytes * elements
        if not self.quantized:
            return 4 * elements
        scales = 2 if weight.format in (Format.Q4M, Format.Q8G16) else 1
        return elements + 4 * scales * (elements // GROUP)
