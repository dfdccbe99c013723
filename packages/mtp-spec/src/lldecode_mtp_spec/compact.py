"""The one tensor operation of top-k sharing."""

import torch
from torch import Tensor


@torch.inference_mode()
def compact(topk_indices: Tensor, rows: Tensor, end: int) -> None:
    """Move the top-k of each request's last token to the request's own row, in place.

    Args:
        topk_indices: int32 ``[max tokens, index_topk]``; a row a token, as the indexer wrote it.
        rows: int64 ``[requests]``, in any order, with repeats or not: request ``i``'s row. Request ``i`` ends up in row ``i``.
        end: the rows after the requests' and before this one become -1, what stock's padded rows hold. Later ones are left alone.
    """
    topk_indices[: len(rows)] = topk_indices.index_select(0, rows)  # a copy first: the rows overlap
    topk_indices[len(rows) : end] = -1
