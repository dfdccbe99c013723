"""What the kernel compiles to, and what that computes: its PTX runs in an emulator, so a GPU is not needed."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

from lldecode.testing import Compiled, assert_close_to_oracle, cross_compile

ARCHS = ["sm_90a", "sm_100a", "sm_103a"]
BASE = {
    **dict(k=256, stride=256, tokens=8, rows=16, cluster=1, warps=2, stages=2, wide=1),
    **dict(dtype=torch.bfloat16, n_major=False, residual=False, pdl=True),
}
# config, batch, M, N
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "plain": ({}, 1, 8, 32),
    "one-token-odd-n": ({}, 1, 1, 37),
    "half-tile-wide": (dict(rows=24, wide=2), 1, 5, 48),
    "deep-queue": (dict(k=512, stride=512, warps=1, stages=5), 1, 3, 16),
    "cluster": (dict(rows=40, cluster=2, warps=2), 1, 8, 80),
    "cluster-of-8-one-token": (dict(k=512, stride=512, cluster=8, warps=2, stages=1), 1, 1, 21),
    "16-tokens-residual": (dict(tokens=16, residual=True), 1, 13, 32),
    "32-tokens-cluster-residual": (dict(tokens=32, cluster=4, warps=2, stages=1, residual=True), 1, 32, 32),
    "24-tokens-fp16": (dict(tokens=24, dtype=torch.float16), 1, 17, 16),
    "rolled": (dict(k=32 * 19, stride=32 * 19, warps=1, stages=3, rows=40), 1, 5, 40),
    "rolled-ragged": (dict(k=32 * 18 + 8, stride=32 * 18 + 8, warps=1, stages=3), 1, 8, 16),
    "rolled-two-deep-wide-cluster": (dict(k=2048, stride=2048, warps=2, stages=2, cluster=2, wide=2, tokens=16), 1, 16, 32),
    "rolled-n-major": (dict(k=768, stride=64, rows=64, warps=2, stages=2, n_major=True), 2, 3, 64),
    "ragged-k": (dict(k=200, stride=200, warps=2, cluster=2), 1, 3, 32),
    "ragged-k-in-a-long-queue": (dict(k=2888, stride=2888, warps=8, stages=4, wide=2, rows=8, tokens=16), 1, 9, 8),
    "strided-weight": (dict(stride=320), 1, 4, 32),
    "no-pdl": (dict(pdl=False), 1, 4, 32),
    "heads": (dict(rows=32), 3, 2, 64),
    "n-major": (dict(k=192, stride=128, rows=64, warps=6, stages=1, n_major=True), 2, 8, 128),
    "n-major-ragged": (dict(k=72, stride=104, rows=64, n_major=True, tokens=16), 2, 11, 104),
    "n-major-cluster": (dict(k=128, stride=256, rows=128, cluster=2, n_major=True, dtype=torch.float16), 1, 3, 256),
}
LARGE = {
    "2624x6144": (dict(k=6144, stride=6144, rows=40, cluster=2, warps=8, stages=5), 113),
    "7168x14336": (dict(k=14336, stride=14336, tokens=16, rows=56, warps=16, stages=3, residual=True), 14),
    "16384x2048": (dict(k=2048, stride=2048, rows=128, warps=8, stages=3), 1),
    "2048x2048": (dict(k=2048, stride=2048, tokens=32, rows=64, cluster=4, warps=8, stages=1, wide=2), 2),
    "absorbed": (dict(k=192, stride=512, rows=64, warps=6, stages=1, n_major=True), 1),
}


@functools.cache
def build(case: str, arch: str) -> Compiled:
    from lldecode_skinny_gemm.kernel import Config

    return cross_compile("lldecode_skinny_gemm.kernel:compile", Config(**BASE | (CASES | LARGE)[case][0]), arch)


def operands(case: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """x, w, y and r in storages with NaN around them; x, y and r have a row stride."""
    known, batch, m, n = CASES[case]
    cfg = BASE | known
    generator = torch.Generator().manual_seed(seed)

    def strided(rows: int, columns: int, pad: int, stride: int | None = None) -> torch.Tensor:
        whole = torch.full((batch, rows + 1, stride or columns + pad), torch.nan, dtype=cfg["dtype"])
        part = whole[:, :rows, :columns]
        return part.copy_(torch.randn(part.shape, generator=generator))

    w = strided(cfg["k"], n, 0, cfg["stride"]) if cfg["n_major"] else strided(n, cfg["k"], 0, cfg["stride"])
    out = {"x": strided(m, cfg["k"], 24), "w": w.mul_(cfg["k"] ** -0.5), "y": strided(m, n, 3).fill_(torch.nan)}
    return out | ({"r": strided(m, n, 1)} if cfg["residual"] else {})


@pytest.mark.parametrize("case", CASES)
def test_the_ptx_computes_the_product(case: str, emulate: Any) -> None:
    from lldecode_skinny_gemm.kernel import Config

    cfg = Config(**BASE | CASES[case][0])
    _, batch, _, n = CASES[case]
    t = operands(case)
    around = t["y"].untyped_storage().clone()
    machine = emulate.Machine(build(case, "sm_90a").ptx, (cfg.cluster, -(-n // cfg.rows), batch), 32 * cfg.warps, cfg.cluster, cfg.smem, t)
    machine.run()
    w = t["w"] if cfg.n_major else t["w"].transpose(1, 2)
    exact = t["x"].double() @ w.double() + (t["r"].double() if cfg.residual else 0)
    plain = (t["x"].float() @ w.float() + (t["r"].float() if cfg.residual else 0)).to(cfg.dtype)
    assert_close_to_oracle(t["y"], exact, plain)
    # only the result was written
    t["y"].fill_(torch.nan)
    assert bytes(t["y"].untyped_storage()) == bytes(around)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", LARGE)
def test_compiles_without_spills_and_with_16_byte_accesses(case: str, arch: str) -> None:
    made = build(case, arch)
    assert made.local_bytes == 0
    (policy,) = re.findall(r"createpolicy\.fractional\.L2::evict_first\.b64 (%rd\d+), 1\.0;", made.ptx)
    copy = r"cp\.async\.cg\.shared\.global\.L2::cache_hint\.L2::128B \[%r\d+ \+ \d+\], \[%rd\d+ \+ \d+\], 16, size, "
    assert len(re.findall(copy + policy + ";", made.ptx)) == len(re.findall(r"cp\.async\.cg", made.ptx)) >= 8
    assert not re.search(r"ld\.(global|shared)\.(v2|b64|b8)", made.ptx)
    assert made.ptx.count("ld.global.v4.b32") and made.ptx.count("ld.shared.v4.b32")
    order = re.findall(r"griddepcontrol\.\w+|cp\.async\.cg|ld\.global|st\.global|\bret;", made.ptx)
    assert order[:2] == ["griddepcontrol.launch_dependents", "cp.async.cg"]
    assert not {"ld.global", "st.global", "ret;"} & set(order[: order.index("griddepcontrol.wait")])
    # nor does the assembler move a load of x before the wait
    early = made.sass[: made.sass.index("ACQBULK")]
    assert "LDGSTS" in early and not re.search(r"\b(LDG|STG)\.", early)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_copy_has_an_address_in_two_parts(arch: str) -> None:
    """Short of registers, ptxas 13 made [R + UR] of it, and encoded that with the cache policy as an illegal instruction."""
    from lldecode_skinny_gemm.kernel import Config

    cfg = Config(**BASE | dict(k=14336, stride=14336, tokens=32, rows=112, cluster=2, warps=4, stages=3, wide=2))
    copies = re.findall(r"LDGSTS[^;]*", cross_compile("lldecode_skinny_gemm.kernel:compile", cfg, arch).sass)
    assert copies and not any("+UR" in copy for copy in copies)
    (policy,) = {int(n) for copy in copies for n in re.findall(r"desc\[UR(\d+)\]", copy)}
    assert policy % 2 == 0


def test_pdl_is_in_the_ptx_only_where_asked() -> None:
    assert "griddepcontrol" not in build("no-pdl", "sm_90a").ptx


@pytest.mark.parametrize("field", [f for f in BASE if f not in ("k", "stride")])
def test_each_field_is_part_of_the_key(field: str) -> None:
    from lldecode_skinny_gemm.kernel import KERNEL, Config

    other = {"dtype": torch.float16, "n_major": True, "residual": True, "pdl": False}.get(field, 64)
    cfg = Config(**BASE)
    assert KERNEL._key(cfg, "sm_90a") != KERNEL._key(dataclasses.replace(cfg, **{field: other}), "sm_90a")
