"""Tensor-core GEMM of a tall weight with a few tokens: the weights stream through shared memory that each lane has to itself.

Weight rows are the 16-row operand of m16n8k16, tokens the 8-column one. A permutation of K that both operands share leaves the
product unchanged, so a lane calls eight neighbouring k its fragments of two steps: it copies 16 contiguous bytes with cp.async
into a slot that only it reads, and neither a barrier nor a bank conflict stands between global memory and the tensor cores.
K is dealt out to the CTAs of a cluster, then to the warps of a CTA; the partial sums meet in shared memory, in a fixed order.
Where n is the contiguous dimension of the weight, a lane copies eight n of eight k and transposes pairs in registers.
"""

import dataclasses
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cutlass_dsl import const_expr, range_constexpr

from lldecode.jit import Kernel

_DTYPES = {torch.bfloat16: (BFloat16, "bf16"), torch.float16: (Float16, "f16")}
_X_REGISTERS = 32  # of activations that a lane loads ahead: they come from the L2, the weights from memory


@dataclasses.dataclass(frozen=True)
class Config:
    """One compiled kernel, for any N and for M <= tokens.

    Attributes:
        k: length of the product, a multiple of 8.
        stride: elements between rows of the weight (between its k where `n_major`), a multiple of 8.
        tokens: 8, 16, 24 or 32.
        rows: n of a CTA, a multiple of 8, of 64 where `n_major`.
        cluster: CTAs that share the K of a tile, 1 to 8.
        warps: warps that share the K of a CTA.
        stages: steps whose weights are under way at once.
        wide: 32 * wide k make a step of a warp.
        n_major: the weight is [K, N], n contiguous.
        residual: an addend is read.
    """

    k: int
    stride: int
    tokens: int
    rows: int
    cluster: int
    warps: int
    stages: int
    wide: int
    dtype: torch.dtype
    n_major: bool
    residual: bool
    pdl: bool

    @property
    def round(self) -> int:
        """k that the warps of a cluster take in one step."""
        return 32 * self.wide * self.warps * self.cluster

    @property
    def steps(self) -> int:
        return -(-self.k // self.round)

    @property
    def pitch(self) -> int:
        """fp32 between the tokens of a warp's partial sums; spreads the writes of a fragment over the banks."""
        return -(-self.rows // 16) * 16 + 4

    @property
    def region(self) -> int:
        """Bytes of a warp: its queue of weights, later its partial sums."""
        return max(min(self.stages, self.steps) * self.wide * self.rows * 64, self.tokens * self.pitch * 4)

    @property
    def share(self) -> int:
        """Outputs that a CTA of a cluster finishes."""
        return -(-self.tokens * self.rows // self.cluster)

    @property
    def smem(self) -> int:
        return self.warps * self.region + (self.cluster * self.share * 4 + 8 if self.cluster > 1 else 0)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, mR: cute.Tensor | None, stream: Any) -> None:
        grid = (self.cluster, cute.ceil_div(mY.shape[2], self.rows), mY.shape[0])
        self.kernel(mX, mW, mY, mR).launch(
            grid=grid, block=(32 * self.warps, 1, 1), cluster=(self.cluster, 1, 1), smem=self.smem, stream=stream,
            min_blocks_per_mp=1, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, mR: cute.Tensor | None) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        rank, tile, batch = cute.arch.block_idx()
        warp, lane = tidx // 32, tidx % 32
        g, t = lane // 4, lane % 4
        threads, groups, steps = 32 * self.warps, self.rows // 8, self.steps
        m_tiles, stages = self.tokens // 8, min(self.stages, steps)
        smem = cute.arch.get_dyn_smem(Float32, 128)
        sPartial = cute.make_tensor(smem, cute.make_layout((self.warps, self.tokens, self.pitch), stride=(self.region // 4, self.pitch, 1)))
        sInbox = cute.make_tensor(
            smem + self.warps * self.region // 4, cute.make_layout((self.cluster, self.share), stride=(self.share, 1))
        )
        sBarrier = cute.recast_ptr(smem + self.warps * self.region // 4 + self.cluster * self.share, dtype=Int64)
        # Output o of the tile is token o // rows of position o % rows; each CTA of the cluster finishes `share` of them.
        real = mY.shape[1] * self.rows
        mine = cutlass.min(cutlass.max(real - rank * self.share, 0), self.share)

        if const_expr(self.pdl):
            # Safe this early: a kernel that launches on this signal waits for the end of this grid before it reads our output.
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.cluster > 1):
            if tidx == 0:
                cute.arch.mbarrier_init(sBarrier, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(sBarrier, self.cluster * mine * 4)
            cute.arch.cluster_arrive_relaxed()

        k = (rank * self.warps + warp) * (32 * self.wide) + 8 * t
        n = tile * self.rows + (8 * g if const_expr(self.n_major) else g)
        pW = (
            mW.iterator.toint()
            + (Int64(batch) * mW.stride[0] + (Int64(k) * self.stride + n if const_expr(self.n_major) else Int64(n) * self.stride + k)) * 2
        )
        pX = [
            mX.iterator.toint() + (Int64(batch) * mX.stride[0] + Int64(cutlass.min(8 * j + g, mX.shape[1] - 1)) * mX.stride[1] + k) * 2
            for j in range(m_tiles)
        ]
        # The `or` of 0 keeps the address whole: short of registers, ptxas 13 adds a lane's part and a warp's uniform one in each copy, and
        # encodes that with a cache policy as an illegal instruction.
        queue = (smem.toint() + warp * self.region + lane * 16) | (k >> 31)
        rows_left = mY.shape[2] - n
        # A token reads a weight once: it is the first to leave the L2, in which activations stay.
        (policy,) = _asm("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", [Int64])

        for step in range_constexpr(stages):
            self.copy_weights(step, 0, queue, pW, policy, rows_left, k)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        ahead = min(stages, max(2, _X_REGISTERS // (4 * self.wide * m_tiles)))
        x = [self.load_x(step, 0, pX, k) for step in range(ahead)]
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # every CTA has started and its barrier is ready

        n_tiles = -(-groups // 2)
        chains = 2 if n_tiles * m_tiles <= 2 else 1  # independent sums, against the latency of a step
        acc = [[[(Float32(0.0),) * 4 for _ in range(m_tiles)] for _ in range(n_tiles)] for _ in range(chains)]
        # Rounds of the queue, all of whose copies are within K, are a loop: unrolled, ptxas spills addresses. It knows no grid.
        rolled = max(0, steps - stages - (self.round * steps != self.k)) // stages * stages
        at = Int32(0)  # k that the loop has passed
        for _ in cutlass.range(cute.arch.grid_dim()[0] // self.cluster * (rolled // stages), unroll=1):
            for step in range_constexpr(stages):
                _wait(stages - 1)
                acc = self.multiply(acc, queue, step, x[0])
                self.copy_weights(step + stages, at, queue, pW, policy, rows_left, k)
                x = [*x[1:], self.load_x(step + ahead, at, pX, k)]
            at += stages * self.round
        for step in range_constexpr(rolled, steps):
            _wait(min(steps, stages + step) - step - 1)
            acc = self.multiply(acc, queue, step, x[0])
            if const_expr(step + stages < steps):
                self.copy_weights(step + stages, 0, queue, pW, policy, rows_left, k)
            x = [*x[1:], *([self.load_x(step + ahead, 0, pX, k)] if step + ahead < steps else [])]

        cute.arch.sync_warp()
        for i in range_constexpr(n_tiles):
            for j in range_constexpr(m_tiles):
                for e in range_constexpr(4):
                    total = acc[0][i][j][e] if const_expr(chains == 1) else acc[0][i][j][e] + acc[1][i][j][e]
                    sPartial[warp, 8 * j + 2 * t + e % 2, 16 * i + g + 8 * (e // 2)] = total
        cute.arch.sync_threads()

        for first in range_constexpr(0, self.tokens * self.rows, threads):
            o = first + tidx
            if o < real:
                m, p = o // self.rows, o % self.rows
                total = sPartial[0, m, p]
                for w in range_constexpr(1, self.warps):
                    total += sPartial[w, m, p]
                if const_expr(self.cluster == 1):
                    self.store(mY, mR, batch, tile, o, total)
                else:
                    _send(sInbox, sBarrier, rank, o % self.share, o // self.share, total)
        if const_expr(self.cluster > 1):
            for first in range_constexpr(0, self.share, threads):
                i = first + tidx
                if i < mine:
                    _receive(sBarrier)  # and the barrier before exit: a CTA that is sent to leaves after the last byte came
                    total = sInbox[0, i]
                    for c in range_constexpr(1, self.cluster):
                        total += sInbox[c, i]
                    self.store(mY, mR, batch, tile, rank * self.share + i, total)

    def left(self, step: int, k: Any) -> Any:
        """k from this lane's first of a step to the end; None where that is always past the step."""
        return None if self.round * (step + 1) <= self.k else self.k - step * self.round - k

    def copy_weights(self, step: int, at: Any, queue: Any, pW: Any, policy: Any, rows: Any, k: Any) -> None:
        """Start the copies of a step, `at` k further."""
        groups, stages = self.rows // 8, min(self.stages, self.steps)
        pW = pW + Int64(at) * (2 * self.stride if self.n_major else 2)
        for i in range(groups):
            for u in range(self.wide):
                ahead = step * self.round + 32 * u
                offset = (ahead + i % 8) * self.stride + i // 8 * 64 if self.n_major else 8 * i * self.stride + ahead
                slot = ((step % stages) * groups + i) * self.wide + u
                _copy(queue, 512 * slot, pW, 2 * offset, policy, rows, i // 8 * 64 if self.n_major else 8 * i, self.left(step, k), 32 * u)
        _asm("cp.async.commit_group;", "", [])

    def load_x(self, step: int, at: Any, pX: list[Any], k: Any) -> list[list[Any]]:
        pX = [p + Int64(at) * 2 for p in pX]
        return [[_load(p, 2 * (step * self.round + 32 * u), self.left(step, k), 32 * u) for p in pX] for u in range(self.wide)]

    def multiply(self, acc: list[Any], queue: Any, step: int, x: list[list[Any]]) -> list[Any]:
        """The sums with the products of a step added."""
        acc, groups, stages = [[list(tiles) for tiles in chain] for chain in acc], self.rows // 8, min(self.stages, self.steps)
        for u in range(self.wide):
            slots = [512 * (((step % stages) * groups + i) * self.wide + u) for i in range(groups)]
            w = [_asm(f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {s}];", "=r,=r,=r,=r,r", [Int32] * 4, queue) for s in slots]
            for i in range(len(acc[0])):
                for half in range(2):
                    a = _transposed(w[i // 4 * 8 + 4 * half :][:4], i % 4) if self.n_major else _fragment(w[2 * i : 2 * i + 2], 2 * half)
                    for j, b in enumerate(x[u]):
                        tiles = acc[half % len(acc)][i]
                        tiles[j] = _mma(_DTYPES[self.dtype][1], tiles[j], *a, *b[2 * half : 2 * half + 2])
        return acc

    @cute.jit
    def store(self, mY: cute.Tensor, mR: Any, batch: Int32, tile: Int32, o: Int32, total: Float32) -> None:
        m, p = o // self.rows, o % self.rows
        n = tile * self.rows + (p // 64 * 64 + p % 8 * 8 + p % 64 // 16 * 2 + p % 16 // 8 if const_expr(self.n_major) else p)
        if n < mY.shape[2]:
            if const_expr(self.residual):
                total += mR[batch, m, n].to(Float32)
            mY[batch, m, n] = total.to(mY.element_type)


def _fragment(rows: list[Any], k: int) -> tuple[Any, ...]:
    """The 16 x 16 operand of rows g and g + 8; the latter are zero where the tile has 8."""
    lo, hi = rows[0], rows[1] if len(rows) > 1 else (Int32(0),) * 4
    return lo[k], hi[k], lo[k + 1], hi[k + 1]


def _transposed(k: list[Any], n: int) -> list[Any]:
    """The 16 x 16 operand of the pair `n` of n, from four k: register lanes are k pairs instead of n pairs."""
    return [_asm(f"prmt.b32 $0, $1, $2, {s:#x};", "=r,r,r", [Int32], k[p][n], k[p + 1][n])[0] for p in (0, 2) for s in (0x5410, 0x7632)]


def _mma(kind: str, acc: tuple[Any, ...], *ab: Any) -> tuple[Any, ...]:
    """acc + A @ B for one m16n8k16 step, where `ab` are the four registers of A and the two of B."""
    ptx = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
    ptx += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return _asm(ptx, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [Float32] * 4, *ab, *acc)


def _wait(pending: int) -> None:
    """Until at most the last `pending` steps of this lane's copies are under way."""
    _asm(f"cp.async.wait_group {pending};", "", [])


def _copy(to: Any, to_offset: int, source: Any, offset: int, policy: Any, rows: Any, row: int, left: Any, k: int) -> None:
    """Start a copy of 16 bytes to shared memory; zeros, and no access, if at most `row` `rows` or at most `k` k are `left`."""
    in_k = "" if left is None else f"setp.gt.and.s32 p, $4, {k}, p; "
    size = f".reg .pred p; .reg .b32 size; setp.gt.s32 p, $3, {row}; {in_k}selp.b32 size, 16, 0, p;"
    ptx = f"{{ {size} cp.async.cg.shared.global.L2::cache_hint.L2::128B [$0 + {to_offset}], [$1 + {offset}], 16, size, $2; }}"
    args = (to, source, policy, rows) if left is None else (to, source, policy, rows, left)
    _asm(ptx, "r,l,l,r,r"[: 2 * len(args) - 1], [], *args)


def _load(source: Any, offset: int, left: Any, k: int) -> tuple[Any, ...]:
    """Eight k, in four registers; zeros, and no access, if at most `k` k are `left`.

    A plain load: ptxas moves the non-coherent kind across griddepcontrol.wait.
    """
    ptx = f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    if left is None:
        return _asm(ptx, "=r,=r,=r,=r,l", [Int32] * 4, source)
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    return _asm(f"{{ .reg .pred p; setp.gt.s32 p, $5, {k}; {zeros} @p {ptx} }}", "=&r,=&r,=&r,=&r,l,r", [Int32] * 4, source, left)


def _send(sInbox: cute.Tensor, sBarrier: Any, source: Any, i: Any, peer: Any, value: Any) -> None:
    """Put `value` into the peer's inbox; its arrival counts on the peer's barrier."""
    slot = cute.arch.map_dsmem_ptr(cute.domain_offset((source, i), sInbox).iterator, peer).toint()
    barrier = cute.arch.map_dsmem_ptr(sBarrier, peer).toint()
    _asm("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];", "r,f,r", [], slot, value, barrier)


def _receive(sBarrier: Any) -> None:
    """Wait for all that this CTA was told to expect."""
    ptx = "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0; @!p bra again; }"
    _asm(ptx, "r", [], sBarrier.toint())


def _asm(ptx: str, constraints: str, types: list[Any], *args: Any) -> tuple[Any, ...]:
    """Inline PTX that stays in order with other inline PTX and with accesses to memory."""
    struct = llvm.StructType.get_literal([t.mlir_type for t in types]) if types else None
    constraints = ",".join(filter(None, (constraints, "~{memory}")))
    out = llvm.inline_asm(struct, [a.ir_value() for a in args], ptx, constraints, has_side_effects=True)
    return tuple(t(llvm.extractvalue(t.mlir_type, out, [i])) for i, t in enumerate(types))


def compile(cfg: Config) -> Any:
    """The function ``f(x, weight, y, residual)``: x [B, M, k], weight [B, N, k] or [B, k, N], y and residual [B, M, N]."""
    dtype = _DTYPES[cfg.dtype][0]

    def operand(align: int = 16) -> Any:
        # Strides are not said to be multiples: a dimension of size 1 may come with any.
        sizes, strides = tuple(cute.sym_int() for _ in range(3)), (cute.sym_int64(), cute.sym_int64(), 1)
        return cute.runtime.make_fake_tensor(dtype, sizes, strides, assumed_align=align)

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(cfg, operand(), operand(), operand(2), operand(2) if cfg.residual else None, stream, options="--enable-tvm-ffi")


KERNEL = Kernel("skinny-gemm", compile, [__file__])
