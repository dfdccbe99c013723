"""Tensor-core GEMM of a tall weight with a few tokens: the weights stream through shared memory that each lane has to itself.

Weight rows are the 16-row operand of m16n8k16, tokens the 8-column one. A permutation of K that both operands share leaves the
product unchanged, so a lane calls eight neighbouring k its fragments of two steps: it copies 16 contiguous bytes with cp.async
into a slot that only it reads, and neither a barrier nor a bank conflict stands between global memory and the tensor cores.
Activations take the same way, as more rows of the tile: they come as deep a queue ahead as the weights, and cost no registers.
K is dealt out to the CTAs of a cluster, then to the warps of a CTA; the partial sums meet in shared memory, in a fixed order.
Where n is the contiguous dimension of the weight, a lane copies eight n of one k, and ldmatrix transposes within the warp.
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

_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"  # four 8 x 8 matrices [k, n]; a lane addresses a row of one
_DTYPES = {torch.bfloat16: (BFloat16, "bf16"), torch.float16: (Float16, "f16")}


@dataclasses.dataclass(frozen=True)
class Config:
    """One compiled kernel, for any N and for M <= tokens.

    Attributes:
        k: length of the product, a multiple of 8.
        stride: elements between rows of the weight (between its k where `n_major`), a multiple of 8.
        tokens: 8, 16, 24 or 32.
        rows: n of a CTA, a multiple of 8, of 32 where `n_major`.
        cluster: CTAs that share the K of a tile, 1 to 8.
        warps: warps that share the K of a CTA.
        stages: steps whose operands are under way at once.
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
        """Bytes of a warp: its queue of weights and activations, later its partial sums."""
        return max(min(self.stages, self.steps) * self.wide * (self.rows + self.tokens) * 64, self.tokens * self.pitch * 4)

    @property
    def share(self) -> int:
        """Outputs that a CTA of a cluster finishes, a multiple of 4."""
        return -(-self.tokens * self.rows // (4 * self.cluster)) * 4

    @property
    def smem(self) -> int:
        return self.warps * self.region + (self.cluster * self.share * 4 + 8 if self.cluster > 1 else 0)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor, mR: cute.Tensor | None, stream: Any) -> None:
        # No minimum of CTAs a multiprocessor: with one, ptxas takes registers that keep the next kernel's CTAs out.
        grid = (self.cluster, cute.ceil_div(mY.shape[2], self.rows), mY.shape[0])
        self.kernel(mX, mW, mY, mR).launch(
            grid=grid, block=(32 * self.warps, 1, 1), cluster=(self.cluster, 1, 1), smem=self.smem, stream=stream,
            use_pdl=self.pdl,
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
        end = smem + self.warps * self.region // 4
        sInbox = cute.make_tensor(end, cute.make_layout((self.cluster, self.share), stride=(self.share, 1)))
        sBarrier = cute.recast_ptr(end + self.cluster * self.share, dtype=Int64)
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

        # What a lane copies, of the weight and of the activations: where to, where from, rows and k left there.
        k, queue = (rank * self.warps + warp) * (32 * self.wide), smem.toint() + warp * self.region
        n, w_k, w_queue = tile * self.rows + g, k + 8 * t, queue + 16 * lane
        if const_expr(self.n_major):
            # Within the 512 bytes of eight n: 128 for each pair of k % 8, rotated so that no two lanes of a phase share a bank.
            n, w_k, w_queue = tile * self.rows + 8 * t, k + g // 2 * 8 + g % 2, queue + 512 * t + 16 * (g ^ (2 * t))
        w_at = Int64(batch) * mW.stride[0] + (Int64(w_k) * self.stride + n if const_expr(self.n_major) else Int64(n) * self.stride + w_k)
        w_from = (w_queue, [mW.iterator.toint() + w_at * 2], mY.shape[2] - n, self.k - w_k)
        x_at = [Int64(batch) * mX.stride[0] + Int64(8 * j + g) * mX.stride[1] + k + 8 * t for j in range(m_tiles)]
        x_from = (queue + 16 * lane, [mX.iterator.toint() + at * 2 for at in x_at], mX.shape[1] - g, self.k - k - 8 * t)

        for step in range_constexpr(stages):
            self.copy(step, 0, w=w_from)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        for step in range_constexpr(stages):
            self.copy(step, 0, x=x_from)
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
                acc = self.multiply(acc, queue, lane, step, stages - 1)
                self.copy(step + stages, at, w_from, x_from)
            at += stages * self.round
        for step in range_constexpr(rolled, steps):
            acc = self.multiply(acc, queue, lane, step, min(steps, stages + step) - step - 1)
            if const_expr(step + stages < steps):
                self.copy(step + stages, 0, w_from, x_from)

        cute.arch.sync_warp()
        for i in range_constexpr(n_tiles):
            for j in range_constexpr(m_tiles):
                for e in range_constexpr(4):
                    total = acc[0][i][j][e] if const_expr(chains == 1) else acc[0][i][j][e] + acc[1][i][j][e]
                    sPartial[warp, 8 * j + 2 * t + e % 2, 16 * i + g + 8 * (e // 2)] = total
        cute.arch.sync_threads()

        # To another CTA go four at once. No sum waits for a store: a branch around the loads would make it.
        width, load = (1, "ld.shared.b32") if self.cluster == 1 else (4, "ld.shared.v4.b32")
        all_o, finished = self.tokens * self.rows, []
        for first in range_constexpr(0, all_o, threads * width):
            o = first + tidx * width
            some = cutlass.min(o, all_o - width) if const_expr(first + threads * width > all_o) else o
            at = smem.toint() + (some // self.rows * self.pitch + some % self.rows) * 4
            parts = [_shared(at, source * self.region, load, Float32, width) for source in range(self.warps)]
            finished.append((o, [sum(part[1:], part[0]) for part in zip(*parts, strict=True)]))
        for o, totals in finished:
            if o < real:
                if const_expr(self.cluster == 1):
                    self.store(mY, mR, batch, tile, o, totals[0])
                else:
                    _send(sInbox, sBarrier, rank, o % self.share, o // self.share, totals)
        if const_expr(self.cluster > 1):
            for first in range_constexpr(0, self.share, threads):
                i = first + tidx
                if i < mine:
                    _receive(sBarrier)  # and the barrier before exit: a CTA that is sent to leaves after the last byte came
                    total = sInbox[0, i]
                    for c in range_constexpr(1, self.cluster):
                        total += sInbox[c, i]
                    self.store(mY, mR, batch, tile, rank * self.share + i, total)

    def slot(self, step: int, u: int, group: int) -> int:
        """Offset in the queue of the 512 bytes of eight rows and 32 k of a step; the tokens come after the rows."""
        return 512 * ((step % min(self.stages, self.steps) * self.wide + u) * ((self.rows + self.tokens) // 8) + group)

    def copy(self, step: int, at: Any, w: Any = None, x: Any = None) -> None:
        """Start the copies of a step, `at` k further, of the weight and of the activations, either of which may be None."""
        tail = self.round * (step + 1) > self.k
        if w and x and self.n_major:
            cute.arch.sync_warp()  # all lanes have read what is overwritten
        for u in range(self.wide):
            k = step * self.round + 32 * u
            for i in range(self.rows // 8 if w else 0):
                to, (source,), rows, left = w
                # From 8 rows all 32 k, or from 32 n the pair i % 4 of every 8 k.
                row, pair, slot = (i // 4 * 32, i % 4 * 2, i // 4 * 4) if self.n_major else (8 * i, 0, i)
                offset = row + (k + pair) * self.stride if self.n_major else row * self.stride + k
                source += Int64(at) * (2 * self.stride if self.n_major else 2)
                _copy(to, self.slot(step, u, slot) + 64 * pair, source, 2 * offset, rows, row, left if tail else None, k + pair)
            for j in range(self.tokens // 8 if x else 0):
                to, sources, rows, left = x
                slot, source = self.slot(step, u, self.rows // 8 + j), sources[j] + Int64(at) * 2
                _copy(to, slot, source, 2 * k, rows, 8 * j, left if tail else None, k)
        _asm("cp.async.commit_group;", "", [])

    def multiply(self, acc: list[Any], queue: Any, lane: Any, step: int, pending: int) -> list[Any]:
        """The sums with the products of a step added, after which `pending` steps are under way."""
        acc, groups, own = [[list(tiles) for tiles in chain] for chain in acc], self.rows // 8, queue + 16 * lane
        _asm(f"cp.async.wait_group {pending};", "", [])
        if self.n_major:
            cute.arch.sync_warp()  # and those of the other lanes
            row = lane % 8 ^ lane // 8 % 2 * 2
            matrices = [queue + lane // 8 % 2 * 512 + lane // 16 * 128 + 16 * (row ^ 4 * odd) for odd in range(2)]
        for u in range(self.wide):
            b = [_shared(own, self.slot(step, u, groups + j)) for j in range(self.tokens // 8)]
            w = [] if self.n_major else [_shared(own, self.slot(step, u, i)) for i in range(groups)]
            for i in range(len(acc[0])):
                for half in range(2):
                    at = self.slot(step, u, 2 * i) + 256 * half
                    a = _shared(matrices[i % 2], at, _TRANSPOSED) if self.n_major else _fragment(w[2 * i : 2 * i + 2], 2 * half)
                    tiles = acc[half % len(acc)][i]
                    for j in range(len(b)):
                        tiles[j] = _mma(_DTYPES[self.dtype][1], tiles[j], *a, *b[j][2 * half : 2 * half + 2])
        return acc

    @cute.jit
    def store(self, mY: cute.Tensor, mR: Any, batch: Int32, tile: Int32, o: Int32, total: Float32) -> None:
        m, n = o // self.rows, tile * self.rows + o % self.rows
        if n < mY.shape[2]:
            if const_expr(self.residual):
                total += mR[batch, m, n].to(Float32)
            mY[batch, m, n] = total.to(mY.element_type)


def _fragment(rows: list[Any], k: int) -> tuple[Any, ...]:
    """The 16 x 16 operand of rows g and g + 8; the latter are zero where the tile has 8."""
    lo, hi = rows[0], rows[1] if len(rows) > 1 else (Int32(0),) * 4
    return lo[k], hi[k], lo[k + 1], hi[k + 1]


def _shared(address: Any, offset: int, load: str = "ld.shared.v4.b32", dtype: Any = Int32, width: int = 4) -> tuple[Any, ...]:
    """Registers from shared memory: by default, eight k of a row."""
    to = "{$0, $1, $2, $3}" if width == 4 else "$0"
    to_constraints = ("=f," if dtype is Float32 else "=r,") * width
    return _asm(f"{load} {to}, [${width} + {offset}];", to_constraints + "r", [dtype] * width, address)


def _mma(kind: str, acc: tuple[Any, ...], *ab: Any) -> tuple[Any, ...]:
    """acc + A @ B for one m16n8k16 step, where `ab` are the four registers of A and the two of B."""
    ptx = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
    ptx += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return _asm(ptx, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [Float32] * 4, *ab, *acc)


def _copy(to: Any, to_offset: int, source: Any, offset: int, rows: Any, row: int, left: Any, k: int) -> None:
    """Start a copy of 16 bytes to shared memory; zeros, and no access, if at most `row` `rows` or at most `k` k are `left`."""
    in_k = "" if left is None else f"setp.gt.and.s32 p, $3, {k}, p; "
    size = f".reg .pred p; .reg .b32 size; setp.gt.s32 p, $2, {row}; {in_k}selp.b32 size, 16, 0, p;"
    ptx = f"{{ {size} cp.async.cg.shared.global.L2::128B [$0 + {to_offset}], [$1 + {offset}], 16, size; }}"
    args = (to, source, rows) if left is None else (to, source, rows, left)
    _asm(ptx, "r,l,r,r"[: 2 * len(args) - 1], [], *args)


def _send(sInbox: cute.Tensor, sBarrier: Any, source: Any, i: Any, peer: Any, values: list[Any]) -> None:
    """Put four values into the peer's inbox; their arrival counts on the peer's barrier."""
    slot = cute.arch.map_dsmem_ptr(cute.domain_offset((source, i), sInbox).iterator, peer).toint()
    barrier = cute.arch.map_dsmem_ptr(sBarrier, peer).toint()
    ptx = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$1, $2, $3, $4}, [$5];"
    _asm(ptx, "r,f,f,f,f,r", [], slot, *values, barrier)


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

    def operand(align: int = 16) -> Any:
        # Strides are not said to be multiples: a dimension of size 1 may come with any.
        sizes, strides = tuple(cute.sym_int() for _ in range(3)), (cute.sym_int64(), cute.sym_int64(), 1)
        return cute.runtime.make_fake_tensor(_DTYPES[cfg.dtype][0], sizes, strides, assumed_align=align)

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(cfg, operand(), operand(), operand(2), operand(2) if cfg.residual else None, stream, options="--enable-tvm-ffi")


KERNEL = Kernel("skinny-gemm", compile, [__file__])
