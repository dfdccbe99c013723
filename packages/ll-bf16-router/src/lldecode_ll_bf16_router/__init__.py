"""Low-latency bf16 router GEMM for MoE decode."""

from lldecode_ll_bf16_router.op import ll_bf16_router, supports, warmup

__all__ = ["ll_bf16_router", "supports", "warmup"]
