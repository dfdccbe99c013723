"""All query work of a DeepSeek-Sparse-Attention layer in one kernel."""

from lldecode_fused_query.op import fused_query, supports

__all__ = ["fused_query", "supports"]
