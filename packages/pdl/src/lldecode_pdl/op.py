"""The ops ``torch.ops.lldecode.pdl_{fused_norm_rope,fused_eh_norm,convert_req_index}`` and what they take.

`pdl` launches with programmatic dependent launch: the kernel may start, and load its weights, before the kernels that write
its inputs have finished. It changes no result. Below SM90 it is ignored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lldecode_pdl import reference

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernels are proven on."""

_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
_INT32, _INT = (torch.int32,), (torch.int32, torch.int64)
_BYTE = (torch.uint8, reference.FP8)
_Spec = tuple[str, Tensor | None, tuple[torch.dtype, ...], tuple[int | None, ...]]


def _check(specs: list[_Spec]) -> str | None:
    """Why a tensor is missing or not of its dtypes, its shape (None: any size), the first one's device, with dense rows; or None."""
    device = None
    for name, x, dtypes, shape in specs:
        if x is None:
            return f"{name}: expected a tensor, got None"
        device = device or x.device
        if x.device != device:
            return f"{name}: expected device {device}, got {x.device}"
        if x.dtype not in dtypes:
            return f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}"
        if x.shape != shape and (x.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True))):
            return f"{name}: expected shape {str(list(shape)).replace('None', '*')}, got {list(x.shape)}"
        if x.ndim and x.stride(-1) != 1 and x.shape[-1] != 1 and x.numel():
            return f"{name}: expected a last dimension of stride 1, got strides {x.stride()}"
    return None


def _power_of_two(name: str, n: int, least: int) -> str | None:
    return None if n >= least and n & (n - 1) == 0 else f"{name}: expected a power of two of at least {least}, got {n}"


# fmt: off
def supports_norm_rope(
    q_out: Tensor, positions: Tensor, q_c: Tensor, q_weight: Tensor, q_eps: float, kv_c: Tensor, kv_weight: Tensor, kv_eps: float,
    k_pe: Tensor, cos_sin_cache: Tensor, index_k: Tensor | None, index_k_weight: Tensor | None, index_k_bias: Tensor | None,
    index_k_eps: float, index_cos_sin_cache: Tensor | None, topk_indices: Tensor | None, slot_mapping: Tensor | None,
    indexer_k_cache: Tensor | None, mla_kv_cache: Tensor | None, mla_kv_cache_dtype: str, mla_k_scale: Tensor | None,
    index_rope_interleave: bool,
) -> str | None:
    """Why :func:`fused_norm_rope` cannot take these arguments, or None."""
    tokens, latent, rope = len(q_c), kv_c.shape[-1], k_pe.shape[-1]
    widths = {"fp8": latent + rope, "fp8_e4m3": latent + rope, "fp8_ds_mla": latent + 4 * (latent // reference.MLA_TILE) + 2 * rope}
    if mla_kv_cache_dtype not in widths:
        return f"mla_kv_cache_dtype: expected {' or '.join(widths)}, got {mla_kv_cache_dtype}"
    specs: list[_Spec] = [
        ("q_c", q_c, _FLOAT, (None, None)), ("q_out", q_out, (q_c.dtype,), tuple(q_c.shape)), ("q_weight", q_weight, _FLOAT, q_c.shape[1:]),
        ("positions", positions, _INT, (tokens,)), ("kv_c", kv_c, _FLOAT, (tokens, latent)), ("kv_weight", kv_weight, _FLOAT, (latent,)),
        ("k_pe", k_pe, _FLOAT, (tokens, rope)), ("cos_sin_cache", cos_sin_cache, _FLOAT, (None, rope)),
    ]
    powers = [("kv_c's last dimension", latent, reference.MLA_TILE), ("k_pe's last dimension", rope, 2)]
    cached = slot_mapping is not None and mla_kv_cache is not None
    if slot_mapping is not None and mla_kv_cache is not None:
        width = widths[mla_kv_cache_dtype]
        specs += ("slot_mapping", slot_mapping[:tokens], _INT, (tokens,)), ("mla_kv_cache", mla_kv_cache, _BYTE, (None, None, width))
        if mla_kv_cache_dtype != "fp8_ds_mla":
            specs.append(("mla_k_scale", None if mla_k_scale is None else mla_k_scale.view(-1), (torch.float32,), (1,)))
    if index_k is not None:
        d = index_k.shape[-1]
        specs += [
            ("index_k", index_k, _FLOAT, (tokens, d)), ("index_k_weight", index_k_weight, _FLOAT, (d,)),
            ("index_k_bias", index_k_bias, _FLOAT, (d,)), ("index_cos_sin_cache", index_cos_sin_cache, _FLOAT, (None, d // 2)),
            ("topk_indices", None if topk_indices is None else topk_indices[:tokens], _INT32, (tokens, None)),
        ]
        powers.append(("index_k's last dimension", d, 4))
        if cached:
            specs.append(("indexer_k_cache", indexer_k_cache, _BYTE, (None, None, d + 4)))
    if reason := _check(specs) or next((r for p in powers if (r := _power_of_two(*p))), None):
        return reason
    for name, x, dense in (("mla_kv_cache", mla_kv_cache, False), ("indexer_k_cache", indexer_k_cache, True)):
        # fp32 scales are stored among the bytes
        if cached and x is not None and (any(n % 4 for n in (x.data_ptr(), *x.stride()[:-1])) or (dense and x.stride(1) != x.shape[2])):
            return f"{name}: expected entries aligned to 4 bytes{', dense in a block' if dense else ''}, got strides {x.stride()}"
    return None


def supports_eh_norm(positions: Tensor, embeds: Tensor, hidden: Tensor, enorm_weight: Tensor, hnorm_weight: Tensor, _: float) -> str | None:
    """Why :func:`fused_eh_norm` cannot take these arguments, or None."""
    rows, dim = tuple(embeds.shape[:1]), tuple(embeds.shape[1:])
    return _check([
        ("embeds", embeds, _FLOAT, (None, None)), ("positions", positions, _INT, rows), ("hidden", hidden, _FLOAT, rows + dim),
        ("enorm_weight", enorm_weight, _FLOAT, dim), ("hnorm_weight", hnorm_weight, _FLOAT, dim),
    ])


def supports_convert(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, block_size: int, workspace_request_ids: Tensor | None,
    workspace_starts: Tensor | None, counts: Tensor | None,
) -> str | None:
    """Why :func:`convert_req_index` cannot take these arguments, or None."""
    if block_size < 1:
        return f"block_size: expected a positive number, got {block_size}"
    tokens = len(req_id)
    specs: list[_Spec] = [
        ("req_id", req_id, _INT32, (None,)), ("block_table", block_table, _INT32, (None, None)),
        ("token_indices", token_indices, _INT32, (tokens, None)),
    ]
    if workspace_request_ids is not None or workspace_starts is not None:
        specs.append(("workspace_request_ids", workspace_request_ids, _INT32, (tokens,)))
        specs.append(("workspace_starts", workspace_starts, _INT32, (None,)))
    if counts is not None:
        specs.append(("counts", counts, _INT32, (tokens,)))
    return _check(specs)
# fmt: on


def _define(function: Callable[..., Any], supports: Callable[..., str | None], mutates: tuple[str, ...], fake: Callable[..., Any]) -> Any:
    """Define ``lldecode::pdl_<name>``: the arguments of the reference, then `pdl`; on CUDA the function of that name in `kernel`."""
    name = function.__name__

    def checked(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if reason := supports(*args[:-1]):
            raise ValueError(reason)
        return args[:-1]

    def cuda(*args: Any) -> Any:
        from lldecode_pdl import kernel

        with torch.cuda.device(next(x for x in args if isinstance(x, Tensor)).device):
            return getattr(kernel, name)(*checked(args), args[-1] and torch.cuda.get_device_capability() >= (9, 0))

    schema = torch.library.infer_schema(function, mutates_args=mutates).replace(") ->", ", bool pdl) ->")
    op = torch.library.custom_op(
        f"lldecode::pdl_{name}", lambda *args: function(*checked(args)), mutates_args=mutates, device_types="cpu", schema=schema
    )
    op.register_kernel("cuda", cuda)
    op.register_fake(fake)
    return getattr(torch.ops.lldecode, f"pdl_{name}")


_WRITTEN = ("q_out", "topk_indices", "indexer_k_cache", "mla_kv_cache")
fused_norm_rope = _define(reference.fused_norm_rope, supports_norm_rope, _WRITTEN, lambda *_: None)
"""Takes the arguments of :func:`lldecode_pdl.reference.fused_norm_rope` and `pdl`. Raises ValueError, before anything is written."""
fused_eh_norm = _define(reference.fused_eh_norm, supports_eh_norm, (), lambda _, x, *__: x.new_empty(len(x), 2 * x.shape[1]))
"""Takes the arguments of :func:`lldecode_pdl.reference.fused_eh_norm` and `pdl`. Raises ValueError."""
convert_req_index = _define(reference.convert_req_index, supports_convert, ("counts",), lambda _, __, x, *___: x.new_empty(x.shape))
"""Takes the arguments of :func:`lldecode_pdl.reference.convert_req_index` and `pdl`. Raises ValueError, before anything is written."""
