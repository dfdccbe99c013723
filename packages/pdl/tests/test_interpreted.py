"""The Triton kernels under Triton's interpreter, against the reference and against vLLM 0.26.0's kernels."""

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from lldecode_pdl import reference

SLOTS = [3, -1, 70, 128, 0]  # the second is padding, the fourth lies past the cache
KERNEL = "lldecode_pdl.kernel"
WRITTEN = ("q_out", "topk_indices", "indexer_k_cache", "mla_kv_cache")


def mla_scales(args: dict[str, Any]) -> torch.Tensor:
    return args["mla_kv_cache"][..., 512:528].contiguous().view(torch.float32)


def without_mla_scales(x: torch.Tensor) -> torch.Tensor:
    """A scale may differ in its last bit where sums are added in another order; everything else that is stored may not."""
    return torch.cat([x[..., :512], x[..., 528:]], -1) if x.shape[-1] == 656 else x


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("slots", [SLOTS, [-1, -1], [], None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_rope_is_the_reference(
    norm_rope_args: Callable,
    copy: Callable,
    interpreted: Callable,
    slots: list[int] | None,
    cache: str,
    interleave: bool,
    dtype: torch.dtype,
) -> None:
    args = norm_rope_args(slots, cache, interleave=interleave, dtype=dtype, tokens=3 if slots is None else None)
    _, _, got = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    expected = copy(args)
    reference.fused_norm_rope(**expected)
    for name in WRITTEN:
        if expected[name] is not None:
            rtol = {torch.bfloat16: 2**-7, torch.float32: 1e-6}[dtype] if name == "q_out" else 0
            got_, expected_ = without_mla_scales(got[name]), without_mla_scales(expected[name])
            torch.testing.assert_close(got_, expected_, rtol=rtol, atol=rtol, msg=f"{name}: {{}}".format)
    if cache == "fp8_ds_mla" and slots is not None:
        torch.testing.assert_close(mla_scales(got), mla_scales(expected), rtol=1e-6, atol=0)


def test_layer_without_indexer_leaves_topk(norm_rope_args: Callable, copy: Callable, interpreted: Callable) -> None:
    args = norm_rope_args(SLOTS, indexer=False)
    _, _, got = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    expected = copy(args)
    reference.fused_norm_rope(**expected)
    assert torch.equal(without_mla_scales(got["mla_kv_cache"]), without_mla_scales(expected["mla_kv_cache"]))
    assert not got["q_out"].isnan().any()
    # the buffer is passed and must stay as it is
    kept = torch.full((len(SLOTS), 64), 7, dtype=torch.int32)
    _, _, got = interpreted(KERNEL, "fused_norm_rope", **{**args, "topk_indices": kept}, pdl=False)
    assert (got["topk_indices"] == 7).all()


def test_every_q_row_is_written_and_only_valid_slots(norm_rope_args: Callable, interpreted: Callable) -> None:
    args = norm_rope_args(SLOTS)
    args["positions"][1] = args["positions"][3] = 2**40  # of padded rows: must not be followed
    _, _, got = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    assert not got["q_out"].isnan().any()
    assert (got["topk_indices"][: len(SLOTS)] == -1).all() and (got["topk_indices"][len(SLOTS) :] == 7).all()
    touched = (got["mla_kv_cache"] != 0xAB).any(-1).flatten().nonzero().flatten().tolist()
    assert touched == [0, 3, 70]
    block, offset = torch.tensor([0, 3, 70]) // 64, torch.tensor([0, 3, 70]) % 64
    untouched = torch.ones(2, 64, dtype=torch.bool)
    untouched[block, offset] = False
    values = got["indexer_k_cache"].flatten(1)[:, : 64 * 128].view(2, 64, 128)
    assert (values[untouched] == 0xAB).all() and (values[~untouched] != 0xAB).any(-1).all()


def stock_norm_rope(args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of ours as vLLM 0.26.0's function takes them."""
    order = list(args)[1:16]  # positions to topk_indices
    names = ("slot_mapping", "indexer_k_cache", "mla_kv_cache", "mla_kv_cache_dtype", "mla_k_scale", "index_rope_interleave")
    return [args[n] for n in order], {n: args[n] for n in names} | {"has_indexer": True, "q_c_out": args["q_out"]}


@pytest.mark.vllm
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
def test_norm_rope_is_stock_where_stock_writes(
    norm_rope_args: Callable, interpreted: Callable, vllm_root: Path, cache: str, interleave: bool
) -> None:
    args = norm_rope_args([3, -1, 70, 0], cache, interleave=interleave, dtype=torch.float32)
    _, _, ours = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    positional, keywords = stock_norm_rope(args)
    q, positional, keywords = interpreted(
        str(vllm_root / "models/deepseek_v32/nvidia/kernels.py"), "fused_norm_rope", *positional, **keywords
    )
    valid = [0, 2, 3]
    torch.testing.assert_close(ours["q_out"][valid], q[valid], rtol=1e-6, atol=1e-6)
    assert torch.equal(without_mla_scales(ours["mla_kv_cache"]), without_mla_scales(keywords["mla_kv_cache"]))
    if cache == "fp8_ds_mla":
        torch.testing.assert_close(mla_scales(ours), mla_scales(keywords), rtol=1e-6, atol=0)
    assert torch.equal(ours["indexer_k_cache"], keywords["indexer_k_cache"])
    assert torch.equal(ours["topk_indices"], positional[14])


@pytest.mark.vllm
@pytest.mark.parametrize("slots", [[3, -1, 70], None])
def test_stock_leaves_q_rows_unwritten_and_ours_does_not(
    norm_rope_args: Callable, interpreted: Callable, vllm_root: Path, slots: list[int] | None
) -> None:
    args = norm_rope_args(slots, tokens=3)
    positional, keywords = stock_norm_rope(args)
    q, _, _ = interpreted(str(vllm_root / "models/deepseek_v32/nvidia/kernels.py"), "fused_norm_rope", *positional, **keywords)
    assert q.isnan().any(-1).tolist() == ([False, True, False] if slots else [True, True, True])
    _, _, ours = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    assert not ours["q_out"].isnan().any()


def neighbours(x: float) -> list[float]:
    return [torch.nextafter(torch.tensor(x), torch.tensor(d)).item() for d in (0.0, torch.inf)]


BOUNDARIES = [448.0, 2.0**-9, 1e-4, 1.75, 1.75 * 2.0**-20, 1.75 * 2.0**100]
AMAX = [0.0, 1e-30, 3.4e38, torch.nan, torch.inf, *BOUNDARIES, *(n for x in BOUNDARIES for n in neighbours(x))]


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("where", ["kernel", "reference"])
def test_index_k_scale_is_exact(norm_rope_args: Callable, copy: Callable, interpreted: Callable, amax: float, where: str) -> None:
    # weight 0 makes the bias what is quantized, whatever the norm; cos 1 and sin 0 keep it
    args = norm_rope_args([5])
    bias = torch.zeros(128)
    bias[97] = amax = torch.tensor(amax).item()
    keep = torch.cat([torch.ones(64, 32), torch.zeros(64, 32)], 1)
    args |= {"index_k_weight": torch.zeros(128), "index_k_bias": bias, "index_cos_sin_cache": keep}
    if where == "kernel":
        _, _, got = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    else:
        got = copy(args)
        reference.fused_norm_rope(**got)
    block = got["indexer_k_cache"][0].flatten()
    scale = block[64 * 128 + 5 * 4 :][:4].view(torch.float32).item()
    value = block[5 * 128 :][:128].view(torch.float8_e4m3fn)[97].float().item()
    largest = 3.4028234663852886e38 if math.isinf(amax) else 0.0 if math.isnan(amax) else amax
    exact = Fraction(max(largest, torch.tensor(1e-4).item())) / 448
    exponent = next(e for e in range(-40, 130) if Fraction(2) ** e >= exact)
    assert scale == 2.0**exponent
    if math.isnan(amax):
        assert math.isnan(value)
    else:
        expected = torch.tensor(amax / scale).clamp(max=448).to(torch.float8_e4m3fn).float().item()
        assert value == expected


@pytest.mark.parametrize("row", [math.nan, math.inf, 0.0, 1e4])
def test_mla_tile_of_special_values(norm_rope_args: Callable, copy: Callable, interpreted: Callable, row: float) -> None:
    args = norm_rope_args([5], dtype=torch.float32)
    args["kv_weight"] = torch.ones(512)
    args["kv_weight"][200] = row
    _, _, got = interpreted(KERNEL, "fused_norm_rope", **args, pdl=False)
    expected = copy(args)
    reference.fused_norm_rope(**expected)
    assert torch.equal(without_mla_scales(got["mla_kv_cache"]), without_mla_scales(expected["mla_kv_cache"]))
    torch.testing.assert_close(mla_scales(got), mla_scales(expected), rtol=1e-6, atol=0)
    values = got["mla_kv_cache"][0, 5, :512].view(torch.float8_e4m3fn).float()
    assert values[200].isnan().item() == (not math.isfinite(row))
    assert not values[:128].isnan().any() and values[:128].any()


@pytest.mark.parametrize("dim", [64, 200])
def test_eh_norm_is_the_reference_and_stock(interpreted: Callable, vllm_root: Path, dim: int) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 5])
    both = torch.randn(3, 2 * dim)
    weights = torch.randn(dim), torch.randn(dim)
    both[0, 0] = torch.nan  # the embedding at position 0 does not count
    args = positions, both[:, :dim], both[:, dim:], *weights, 1e-5
    got, _, _ = interpreted(KERNEL, "fused_eh_norm", *args, pdl=False)
    torch.testing.assert_close(got, reference.fused_eh_norm(*args), rtol=1e-6, atol=1e-6)
    stock, _, _ = interpreted(str(vllm_root / "models/deepseek_v32/nvidia/kernels.py"), "fused_eh_norm", *args)
    torch.testing.assert_close(got, stock, rtol=1e-6, atol=1e-6)
    assert (got[0, :dim] == 0).all() and got[0, dim:].any()


@pytest.mark.vllm
@pytest.mark.parametrize("workspace", [False, True])
@pytest.mark.parametrize("topk", [128, 2048])
def test_conversion_is_the_reference_and_stock(interpreted: Callable, vllm_root: Path, topk: int, workspace: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    req_id = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    table = torch.randint(0, 1000, (3, 7), generator=generator, dtype=torch.int32)
    wide = torch.randint(-3, 7 * 64 + 70, (4, topk + 8), generator=generator, dtype=torch.int32)  # also past the table
    indices = wide[:, :topk]
    indices[2] = -1
    prefill = (torch.tensor([-1, 0, 1, -1], dtype=torch.int32), torch.tensor([10, 5000], dtype=torch.int32)) if workspace else (None, None)
    counts = torch.full((4,), -5, dtype=torch.int32)
    got, (*_, counted), _ = interpreted(KERNEL, "convert_req_index", req_id, table, indices, 64, *prefill, counts, pdl=False)
    expected = reference.convert_req_index(req_id, table, indices, 64, *prefill, counts)
    assert torch.equal(got, expected) and torch.equal(counted, counts)
    assert counts[2] == 0 and 0 < counts[0] < topk
    keywords = {"BLOCK_SIZE": 64, "NUM_TOPK_TOKENS": topk, "HAS_PREFILL_WORKSPACE": workspace, "return_valid_counts": True}
    keywords |= {"prefill_workspace_request_ids": prefill[0], "prefill_workspace_starts": prefill[1]}
    (stock, stock_counts), _, _ = interpreted(
        str(vllm_root / "v1/attention/backends/mla/sparse_utils.py"),
        "triton_convert_req_index_to_global_index",
        req_id,
        table,
        indices,
        **keywords,
    )
    assert torch.equal(got, stock) and torch.equal(counted, stock_counts)
