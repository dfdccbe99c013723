"""Tensor-core router GEMM: K is split over the CTAs of a cluster and the warps of a CTA; the partial sums meet through DSMEM.

Any permutation of K that both operands share leaves the product unchanged. So a thread loads the 16 bytes that lie next to
each other, eight bf16 of K, and calls them its fragments of two m16n8k16 steps: no shared memory stands between global
memory and the tensor cores, and a warp reads whole 64-byte segments of each row. Weights are the operand of 16 rows,
tokens that of 8.
"""

import dataclasses
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.typing import Float32, Int32, Int64
from cutlass.cutlass_dsl import const_expr, range_constexpr

from lldecode.jit import Kernel
from lldecode_ll_bf16_router import kernel_common as common

_HINT = "evict_first"  # up to 8 % faster than no_allocate on an H200


@dataclasses.dataclass(frozen=True)
class SplitK:
    """One compiled kernel, for any N and for M <= 8 * m_tiles.

    Attributes:
        k: row length, a multiple of 8.
        n_tiles: tiles of 16 weight rows in a CTA, a power of two.
        m_tiles: tiles of 8 tokens.
        cluster: CTAs that share the K of a tile, 1 to 8.
        warps: warps that share the K of a CTA.
    """

    k: int
    n_tiles: int
    m_tiles: int
    cluster: int
    warps: int
    out_dtype: torch.dtype
    pdl: bool

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, stream: Any) -> None:
        grid = (self.cluster * cute.ceil_div(mW.shape[0], 16 * self.n_tiles), 1, 1)
        block = (32 * self.warps, 1, 1)
        cluster = (self.cluster, 1, 1)
        # Without a minimum of blocks ptxas saves registers by sinking loads to their first use, one latency after the other.
        self.kernel(mX, mW, mY).launch(grid=grid, block=block, cluster=cluster, stream=stream, min_blocks_per_mp=1, use_pdl=self.pdl)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile, rank = block // self.cluster, block % self.cluster
        warp, lane = tidx // 32, tidx % 32
        g, t = lane // 4, lane % 4
        threads, tile_n, tile_m = 32 * self.warps, 16 * self.n_tiles, 8 * self.m_tiles
        # Output o of the tile is token o // tile_n of row o % tile_n; each CTA of the cluster finishes `share` of them.
        share = -(-tile_m * tile_n // self.cluster)
        real = mY.shape[0] * tile_n
        mine = min(max(real - rank * share, 0), share)

        pitch = tile_n + 4  # spreads the writes of a fragment over the banks
        sPartial = _smem((self.warps, tile_m, tile_n), (tile_m * pitch, pitch, 1))
        sInbox = _smem((self.cluster, share), (share, 1))
        sBarrier = cute.arch.alloc_smem(Int64, 1)

        if const_expr(self.pdl):
            # Safe this early: a kernel that launches on this signal waits for the end of this grid before it reads our output.
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.cluster > 1):
            if tidx == 0:
                cute.arch.mbarrier_init(sBarrier, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(sBarrier, self.cluster * mine * 4)
            cute.arch.cluster_arrive_relaxed()

        steps = -(-self.k // (32 * self.cluster * self.warps))
        k = (rank * self.warps + warp) * (32 * steps) + 8 * t
        left = None if 32 * steps * self.cluster * self.warps == self.k else self.k - k
        pW = [common.address(mW, tile * tile_n + 8 * i + g, k) for i in range(2 * self.n_tiles)]
        pX = [common.address(mX, 8 * j + g, k) for j in range(self.m_tiles)]
        tiles = self.n_tiles * self.m_tiles
        chains = 2 if tiles <= 2 else 1  # independent sums, against the latency of a step
        # Steps whose operands are all in registers, and all in flight, at once.
        batch = max(1, (common.registers(threads) - 4 * tiles * chains) // (4 * (2 * self.n_tiles + self.m_tiles)))
        acc = [[[(Float32(0.0),) * 4 for _ in range(self.m_tiles)] for _ in range(self.n_tiles)] for _ in range(chains)]
        for first in range_constexpr(0, steps, batch):
            offsets = [32 * s for s in range(first, min(first + batch, steps))]
            rW = [[common.load(p, o, left, _HINT) for p in pW] for o in offsets]
            if const_expr(self.cluster > 1 and first == 0):
                cute.arch.cluster_wait()  # every CTA has started and its barrier is ready
            if const_expr(self.pdl and first == 0):
                cute.arch.griddepcontrol_wait()
            rX = [[common.load(p, o, left, _HINT) for p in pX] for o in offsets]
            for w, x in zip(rW, rX, strict=True):
                for half in range_constexpr(2):
                    lo, hi = 2 * half, 2 * half + 1
                    for i in range_constexpr(self.n_tiles):
                        a = w[2 * i][lo], w[2 * i + 1][lo], w[2 * i][hi], w[2 * i + 1][hi]
                        for j in range_constexpr(self.m_tiles):
                            acc[half % chains][i][j] = _mma(acc[half % chains][i][j], *a, x[j][lo], x[j][hi])

        for i in range_constexpr(self.n_tiles):
            for j in range_constexpr(self.m_tiles):
                for e in range_constexpr(4):
                    total = acc[0][i][j][e] if const_expr(chains == 1) else acc[0][i][j][e] + acc[1][i][j][e]
                    sPartial[warp, 8 * j + 2 * t + e % 2, 16 * i + g + 8 * (e // 2)] = total
        cute.arch.sync_threads()

        for first in range_constexpr(0, tile_m * tile_n, threads):
            o = first + tidx
            if o < real:
                m, n = o // tile_n, o % tile_n
                total = common.tree_sum([sPartial[w, m, n] for w in range(self.warps)])
                if const_expr(self.cluster == 1):
                    _store(mY, m, tile * tile_n + n, total)
                else:
                    _send(sInbox, sBarrier, rank, o % share, o // share, total)

        if const_expr(self.cluster > 1):
            for first in range_constexpr(0, share, threads):
                i = first + tidx
                if i < mine:
                    _receive(sBarrier)  # and the barrier before exit: a CTA that is sent to leaves after the last byte came
                    total = common.tree_sum([sInbox[c, i] for c in range(self.cluster)])
                    o = rank * share + i
                    _store(mY, o // tile_n, tile * tile_n + o % tile_n, total)


def _smem(shape: tuple[int, ...], stride: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(cute.arch.alloc_smem(Float32, shape[0] * stride[0]), cute.make_layout(shape, stride=stride))


def _mma(acc: tuple[Any, ...], *ab: Any) -> tuple[Any, ...]:
    """acc + A @ B for one m16n8k16 step, where `ab` are the four registers of A and the two of B."""
    ptx = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return common.asm(ptx, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [Float32] * 4, *ab, *acc)


@cute.jit
def _store(mY: cute.Tensor, m: Int32, n: Int32, value: Float32) -> None:
    if n < mY.shape[1]:
        mY[m, n] = value.to(mY.element_type)


def _send(sInbox: cute.Tensor, sBarrier: Any, source: Any, i: Any, peer: Any, value: Any) -> None:
    """Put `value` into the peer's inbox; its arrival counts on the peer's barrier."""
    slot = cute.arch.map_dsmem_ptr(cute.domain_offset((source, i), sInbox).iterator, peer).toint()
    barrier = cute.arch.map_dsmem_ptr(sBarrier, peer).toint()
    common.asm("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];", "r,f,r", [], slot, value, barrier)


def _receive(sBarrier: Any) -> None:
    """Wait for all that this CTA was told to expect."""
    ptx = "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0; @!p bra again; }"
    common.asm(ptx, "r", [], sBarrier.toint())


def compile(cfg: SplitK) -> Any:
    """The function ``f(x, weight, y)`` of a config."""
    return common.compile_for(cfg, cfg.k, cfg.out_dtype)


KERNEL = Kernel("ll-bf16-router-splitk", compile, [__file__, common.__file__])
