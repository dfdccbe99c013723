"""The semantics in plain torch: accumulate in fp32, add the residual, round once."""

from torch import Tensor


def skinny_gemm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """x ``[..., M, K]`` times weight ``[..., N, K]`` transposed, plus residual ``[..., M, N]``, in x's dtype."""
    total = x.float() @ weight.float().transpose(-1, -2)
    return (total if residual is None else total + residual.float()).to(x.dtype)
