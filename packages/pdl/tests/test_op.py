"""The ops on a CPU: semantics against independent arithmetic, the dispatcher's contract, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lldecode.testing import assert_close_to_oracle, opcheck
from lldecode_pdl import op, reference

SLOTS = [3, -1, 70, 128, 0]


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """RoPE of the first elements as a complex product, in fp64."""
    half = cos_sin.shape[-1] // 2
    turn = torch.complex(*cos_sin.double().chunk(2, -1))
    rope = x[..., : 2 * half].double()
    pairs = rope.unflatten(-1, (half, 2)) if interleave else rope.unflatten(-1, (2, half)).transpose(-1, -2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    product = product.flatten(-2) if interleave else product.transpose(-1, -2).flatten(-2)
    return torch.cat([product, x[..., 2 * half :].double()], -1)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
def test_norm_rope_is_what_the_layer_needs(norm_rope_args: Callable, cache: str, interleave: bool) -> None:
    args = norm_rope_args(SLOTS, cache, interleave=interleave)
    op.fused_norm_rope(*args.values(), False)
    x = args["q_c"].double()
    oracle = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * args["q_weight"].double()
    assert_close_to_oracle(args["q_out"], oracle, torch.nn.functional.rms_norm(args["q_c"], (1536,), args["q_weight"], 1e-5))

    rows, slots = [0, 2, 4], torch.tensor([3, 70, 0])
    kv = args["kv_c"][rows].double()
    latent = kv * (kv.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * args["kv_weight"].double()
    rope = rotated(args["k_pe"][rows], args["cos_sin_cache"][args["positions"][rows]], True)
    entry = args["mla_kv_cache"].flatten(0, 1)[slots]
    if cache == "fp8":
        torch.testing.assert_close(entry.view(torch.float8_e4m3fn).double() * 0.375, torch.cat([latent, rope], -1), rtol=2**-4, atol=2**-10)
    else:
        scale = entry[:, 512:528].contiguous().view(torch.float32).double()
        torch.testing.assert_close(scale, latent.unflatten(-1, (4, 128)).abs().amax(-1) / 448, rtol=1e-6, atol=0)
        values = entry[:, :512].view(torch.float8_e4m3fn).double() * scale.repeat_interleave(128, 1)
        torch.testing.assert_close(values, latent, rtol=2**-4, atol=scale.max().item() * 2**-9)
        assert torch.equal(entry[:, 528:].contiguous().view(torch.bfloat16), rope.bfloat16())

    k = torch.nn.functional.layer_norm(
        args["index_k"][rows].double(), (128,), args["index_k_weight"].double(), args["index_k_bias"].double(), 1e-6
    )
    k = rotated(k, args["index_cos_sin_cache"][args["positions"][rows]], interleave)
    blocks = args["indexer_k_cache"].flatten(1)
    for i, slot in enumerate(slots.tolist()):
        block = blocks[slot // 64]
        scale = block[64 * 128 + slot % 64 * 4 :][:4].view(torch.float32).double()
        value = block[slot % 64 * 128 :][:128].view(torch.float8_e4m3fn).double() * scale
        torch.testing.assert_close(value, k[i], rtol=2**-4, atol=scale.item() * 2**-9)
        assert k[i].abs().max() <= 448 * scale < 2 * k[i].abs().max() and scale.log2() % 1 == 0


@pytest.mark.parametrize("indexer", [True, False])
@pytest.mark.parametrize("slots", [SLOTS, None])
def test_norm_rope_contract(norm_rope_args: Callable, copy: Callable, slots: list[int] | None, indexer: bool) -> None:
    args = norm_rope_args(slots, indexer=indexer, tokens=3 if slots is None else None)
    # everything given: nothing that is written may hold NaN, which never equals itself
    args["q_out"].zero_()
    args |= {k: v.zero_() for k in ("mla_kv_cache", "indexer_k_cache") if (v := args[k]) is not None}
    opcheck(torch.ops.lldecode.pdl_fused_norm_rope.default, [*copy(args).values(), False])


def test_eh_norm_and_conversion_contract() -> None:
    x = torch.randn(3, 64)
    opcheck(torch.ops.lldecode.pdl_fused_eh_norm.default, (torch.tensor([0, 1, 2]), x, x + 1, x[0].clone(), x[1].clone(), 1e-6, True))
    ids = torch.tensor([0, 1, 0], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    for counts in (None, torch.zeros(3, dtype=torch.int32)):
        args = (ids, table, torch.full((3, 16), 5, dtype=torch.int32), 64, None, None, counts, True)
        opcheck(torch.ops.lldecode.pdl_convert_req_index.default, args)


def test_nothing_to_do(norm_rope_args: Callable) -> None:
    args = norm_rope_args([])
    op.fused_norm_rope(*args.values(), True)
    assert (args["topk_indices"] == 7).all() and (args["mla_kv_cache"] == 0xAB).all()
    empty = torch.empty(0, 64)
    assert op.fused_eh_norm(torch.empty(0, dtype=torch.int64), empty, empty, torch.ones(64), torch.ones(64), 1e-6, True).shape == (0, 128)
    none = torch.empty(0, dtype=torch.int32)
    assert op.convert_req_index(none, torch.zeros(1, 4, dtype=torch.int32), none.view(0, 32), 64, None, None, none, True).shape == (0, 32)


REFUSED: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "unquantized cache": ({"mla_kv_cache_dtype": lambda _: "auto"}, "mla_kv_cache_dtype: expected fp8"),
    "width of another layout": ({"mla_kv_cache_dtype": lambda _: "fp8"}, r"mla_kv_cache: expected shape \[\*, \*, 576\]"),
    "missing scale": (
        {"mla_kv_cache_dtype": lambda _: "fp8", "mla_kv_cache": lambda x: x[..., :576], "mla_k_scale": lambda _: None},
        "mla_k_scale",
    ),
    "query dtype": ({"q_c": lambda x: x.double()}, "q_c: expected torch.bfloat16"),
    "output dtype": ({"q_out": lambda x: x.float()}, "q_out: expected torch.bfloat16"),
    "rows": ({"kv_c": lambda x: x[:4]}, r"kv_c: expected shape \[5, 512\]"),
    "column stride": ({"kv_c": lambda x: x.t().contiguous().t()}, "kv_c: expected a last dimension of stride 1"),
    "latent": (
        {"kv_c": lambda x: x[:, :500], "kv_weight": lambda x: x[:500], "mla_kv_cache": lambda x: x[..., :640]},
        "kv_c's last dimension",
    ),
    "short slots": ({"slot_mapping": lambda x: x[:4]}, r"slot_mapping: expected shape \[5\]"),
    "short top-k": ({"topk_indices": lambda x: x[:4]}, r"topk_indices: expected shape \[5, \*\]"),
    "no indexer cache": ({"indexer_k_cache": lambda _: None}, "indexer_k_cache: expected a tensor"),
    "bfloat16 cache": ({"indexer_k_cache": lambda x: x.view(torch.bfloat16)}, "indexer_k_cache: expected torch.uint8"),
    "misaligned cache": (
        {"mla_kv_cache": lambda x: torch.zeros(2 * 64 * 657, dtype=torch.uint8).view(2, 64, 657)[..., 1:]},
        "aligned to 4 bytes",
    ),
    "padded indexer entries": ({"indexer_k_cache": lambda x: torch.zeros(2, 64, 136, dtype=torch.uint8)[..., :132]}, "dense in a block"),
    "index rope": ({"index_cos_sin_cache": lambda x: x[:, :32]}, r"index_cos_sin_cache: expected shape \[\*, 64\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_norm_rope_refuses_and_writes_nothing(norm_rope_args: Callable, case: str) -> None:
    changes, message = REFUSED[case]
    args = norm_rope_args(SLOTS)
    args["q_out"].fill_(7)
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    changed = args | {k: change(args[k]) for k, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        op.fused_norm_rope(*changed.values(), False)
    assert all(torch.equal(args[k], v) for k, v in before.items())


def test_norm_rope_refuses_another_device(norm_rope_args: Callable) -> None:
    args = norm_rope_args(SLOTS)
    reason = op.supports_norm_rope(**args | {"positions": args["positions"].to("meta")})
    assert reason == "positions: expected device cpu, got meta"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3)}, "positions: expected torch.int32 or torch.int64"),
        ({2: torch.zeros(3, 65)}, r"hidden: expected shape \[3, 64\]"),
        ({3: torch.zeros(65)}, r"enorm_weight: expected shape \[64\]"),
        ({1: torch.zeros(64)}, r"embeds: expected shape \[\*, \*\]"),
    ],
)
def test_eh_norm_refuses(change: dict[int, Any], message: str) -> None:
    args = [torch.zeros(3, dtype=torch.int64), torch.zeros(3, 64), torch.zeros(3, 64), torch.zeros(64), torch.zeros(64), 1e-6]
    with pytest.raises(ValueError, match=message):
        op.fused_eh_norm(*(change.get(i, x) for i, x in enumerate(args)), False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3, dtype=torch.int64)}, "req_id: expected torch.int32"),
        ({2: torch.zeros(2, 8, dtype=torch.int32)}, r"token_indices: expected shape \[3, \*\]"),
        ({3: 0}, "block_size: expected a positive number"),
        ({4: torch.zeros(3, dtype=torch.int32)}, "workspace_starts: expected a tensor"),
        ({6: torch.zeros(2, dtype=torch.int32)}, r"counts: expected shape \[3\]"),
    ],
)
def test_conversion_refuses(change: dict[int, Any], message: str) -> None:
    int32 = torch.int32
    args = [torch.zeros(3, dtype=int32), torch.zeros(2, 4, dtype=int32), torch.zeros(3, 8, dtype=int32), 64, None, None, None]
    with pytest.raises(ValueError, match=message):
        op.convert_req_index(*(change.get(i, x) for i, x in enumerate(args)), False)


def test_scale_is_a_power_of_two_at_or_above() -> None:
    x = torch.logspace(-6, 38, 2000, base=10.0)[:, None]
    scale = reference.ue8m0_scale(x)
    assert (scale.log2() % 1 == 0).all()
    assert (x.double() <= 448 * scale.double()).all() and ((x <= 1e-4) | (x.double() > 224 * scale.double())).all()
