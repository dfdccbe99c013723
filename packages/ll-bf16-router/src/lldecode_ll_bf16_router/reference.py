"""The router GEMM in plain torch."""

import torch


def ll_bf16_router(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype = torch.float32, accumulate: torch.dtype = torch.float32
) -> torch.Tensor:
    """``x @ weight.T`` with products and sums in `accumulate`, rounded once to `out_dtype`.

    Args:
        x: [M, K].
        weight: [N, K].
        accumulate: float32 is what the kernels compute in; float64 makes an oracle.

    Returns:
        [M, N].
    """
    return (x.to(accumulate) @ weight.to(accumulate).T).to(out_dtype)
