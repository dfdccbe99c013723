"""Small-M GEMMs of the decode path, at the memory roof."""

from lldecode_skinny_gemm.op import skinny_bmm, skinny_gemm

__all__ = ["skinny_bmm", "skinny_gemm"]
