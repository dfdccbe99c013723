"""Inputs as vLLM hands them over, and an emulator of the compiled PTX: on a machine without a GPU the kernel itself is what runs."""

import ctypes
import dataclasses
import math
import re
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass
class Case:
    """Arguments of the op for one layer; outputs are poisoned. `padding` is what lies between the heads of two tokens' outputs."""

    positions: Tensor
    q_pe: Tensor
    cos_sin: Tensor
    ql_nope: Tensor | None
    q_scale: Tensor | None
    mqa_output: Tensor
    index_q: Tensor | None
    index_cos_sin: Tensor | None
    index_weights: Tensor | None
    idx_q_fp8: Tensor | None
    idx_weights_out: Tensor | None
    scales: dict[str, Any]
    padding: Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))[:-2]

    @property
    def call(self) -> tuple[Any, ...]:
        """All arguments of the op, without PDL."""
        return *self.args, *self.scales.values(), False

    @property
    def outputs(self) -> list[Tensor]:
        return [x for x in (self.mqa_output, self.idx_q_fp8, self.idx_weights_out) if x is not None]


def _poisoned(*shape: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.full((math.prod(shape) * dtype.itemsize,), 0xAB, dtype=torch.uint8, device=device).view(dtype).view(shape)


def make_case(
    tokens: int,
    heads: int,
    index_heads: int,
    output: str = "fp8",
    *,
    interleave: bool = True,
    cos_sin: torch.dtype = torch.float32,
    q_scale: float = 1.0,
    shift: int = 0,
    raw: bool = False,
    seed: int = 0,
    device: Any = "cpu",
) -> Case:
    """Strided as in vLLM: q_pe is the end of a head, ql_nope a transposed product, index_weights a column slice, mqa_output padded.

    Args:
        shift: elements that the queries lie off their alignment.
        raw: a third of the queries' elements are random bit patterns: NaN, infinities, subnormals, the largest numbers.
    """
    g = torch.Generator().manual_seed(seed)

    def query(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=g).bfloat16()
        if raw:
            patterns = torch.randint(-(2**15), 2**15, shape, generator=g).to(torch.int16).view(torch.bfloat16)
            x = torch.where(torch.rand(shape, generator=g) < 0.33, patterns, x)
        return x.to(device)

    angles = torch.rand(50, 32, generator=g) * 2 * math.pi
    table = torch.cat([angles.cos(), angles.sin()], -1).to(device, cos_sin)
    width = 64 if output == "rope" else 576
    padded = _poisoned(tokens, heads + 1, width, dtype=FP8 if output == "fp8" else torch.bfloat16, device=device)
    indexed = index_heads > 0
    return Case(
        positions=torch.randint(0, 50, (tokens,), generator=g).to(device),
        q_pe=query(tokens, heads, 192 + shift)[..., 128 + shift :],
        cos_sin=table,
        ql_nope=None if output == "rope" else query(heads, tokens, 512 + shift)[..., shift:].transpose(0, 1),
        q_scale=torch.tensor(q_scale, device=device),
        mqa_output=padded[:, :heads],
        index_q=query(tokens, index_heads, 128 + shift)[..., shift:] if indexed else None,
        index_cos_sin=table if indexed else None,
        index_weights=torch.randn(tokens, 128 + index_heads, generator=g).bfloat16().to(device)[:, 128:] if indexed else None,
        idx_q_fp8=_poisoned(tokens, index_heads, 128, dtype=FP8, device=device) if indexed else None,
        idx_weights_out=_poisoned(tokens, index_heads, dtype=torch.float32, device=device) if indexed else None,
        scales={"softmax_scale": 128**-0.5, "head_scale": max(index_heads, 1) ** -0.5, "index_rope_interleave": interleave},
        padding=padded[:, heads:],
    )


def as_bits(x: Tensor) -> Tensor:
    """The bits of x, every NaN the same."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    return torch.where(x.float().isnan(), 0x7F, x.contiguous().view(integer))


def differences(case: Case, expected: list[Tensor]) -> list[int]:
    """For each output, how many of its elements are not bit for bit as expected."""
    return [int((as_bits(x) != as_bits(y)).sum()) for x, y in zip(case.outputs, expected, strict=True)]


def run_reference(case: Case) -> list[Tensor]:
    from lldecode_fused_query import reference

    scale = case.q_scale if case.mqa_output.dtype == FP8 else None
    out = [reference.mqa_query(case.q_pe, case.cos_sin[case.positions], case.ql_nope, scale)]
    if case.index_q is not None:
        table = case.index_cos_sin[case.positions]
        interleave, scales = case.scales["index_rope_interleave"], (case.scales["softmax_scale"], case.scales["head_scale"])
        out += reference.index_query(case.index_q, table, case.index_weights, *scales, interleave)
    return out


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def bits32(x: Any) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(x).view(np.uint32))


def fma(a: float, b: float, c: float) -> float:
    """Rounded to odd in fp64, so that the rounding to fp32 is the only one."""
    product = a * b
    total = product + c
    if math.isfinite(total):
        of_c = total - product
        error = (product - (total - of_c)) + (c - of_c)
        if error and struct.unpack("<q", struct.pack("<d", total))[0] % 2 == 0:
            total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return total


def f64(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def double(op: str, *x: float) -> float:
    """In fp64: products of which are exact, sums of which are rounded as `op` says."""
    if op.startswith("fma.r"):
        product = x[0] * x[1]
        total = product + x[2]
        if math.isfinite(total) and (error := Fraction(product) + Fraction(x[2]) - Fraction(total)):
            toward = {"rm": -math.inf, "rp": math.inf}.get(op[4:6])
            if toward and (error > 0) == (toward > 0):
                total = math.nextafter(total, toward)
        elif total == 0 and op[4:6] == "rm" and math.copysign(1, product) != math.copysign(1, x[2]):
            total = -0.0
        return total
    return {"mul": lambda a, b: a * b, "abs": abs}[op.partition(".")[0]](*x)


def signed(x: int, width: int) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def to_fp8(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).clamp(-448, 448).to(FP8).view(torch.uint8))


def to_bf16(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).bfloat16().view(torch.int16)) & 0xFFFF


def fmax(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


FLOAT: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: np.float64(a) * b,
    "add": lambda a, b: np.float32(a) + np.float32(b),
    "sub": lambda a, b: np.float32(a) - np.float32(b),
    "neg": lambda a: -a,
    "abs": abs,
    "fma": fma,
    "max": fmax,
    "rcp": lambda a: np.nextafter(np.float32(1) / np.float32(a), np.float32(0)),  # approximate: may be off by one
    "mov": lambda a: a,
}
INTEGER: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "mov": lambda a: a,
    "not": lambda a: ~a,
    "min": min,
    "max": max,
}
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b and a == a and b == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "nan": lambda a, b: a != a or b != b,
}


class Memory:
    """Addresses of tensors. An access outside of their storage, or off its own alignment, is an error."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, Any]] = []

    def address(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        self.regions.append(
            (storage.data_ptr(), np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())))
        )
        return x.data_ptr()

    def at(self, address: int, size: int) -> Any:
        assert address % size == 0, f"misaligned access of {size} bytes at {address:#x}"
        for base, data in self.regions:
            if base <= address and address + size <= base + len(data):
                return data[address - base : address - base + size]
        raise AssertionError(f"access outside of the tensors: {size} bytes at {address:#x}")


class Program:
    """PTX of one kernel, run thread by thread; the threads of a warp meet at shuffles and votes.

    Args:
        doubt: False: no vote finds a lane in doubt.
    """

    def __init__(self, ptx: str, doubt: bool = True) -> None:
        self.doubt, self.votes = doubt, 0
        self.code: list[tuple[str, str, list[str], list[str]]] = []
        self.labels: dict[str, int] = {}
        scope, inner = 0, False
        for statement in re.split(r"[;\n]", re.sub(r"//.*", "", ptx[ptx.index("\n{") + 2 : ptx.rindex("}")])):
            opens = statement.strip().startswith("{")
            scope, inner = scope + opens, inner or opens
            statement = statement.strip().removeprefix("{").strip()
            if statement == "}":
                inner = False
            elif not statement:
                continue
            elif statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.code)
            elif not statement.startswith("."):
                predicate, op, rest = re.match(r"(?:@(\S+)\s+)?(\S+)\s*(.*)", statement).groups()  # type: ignore[union-attr]
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
                if inner:  # registers of an asm block are its own
                    own = lambda text, scope=scope: re.sub(r"(?<![%\w.])([a-z]\w*)", rf"{scope}\1", text)  # noqa: E731
                    operands, predicate = [own(o) for o in operands], own(predicate or "")
                self.code.append((predicate or "", op, op.split("."), operands))

    def run(self, params: list[bytes], grid: tuple[int, int], threads: int, memory: Memory) -> None:
        self.params, self.memory = params, memory
        for y in range(grid[1]):
            for x in range(grid[0]):
                for first in range(0, threads, 32):
                    self._warp([self._thread({"%ctaid.x": x, "%ctaid.y": y, "%tid.x": first + i, "%laneid": i}) for i in range(32)])

    def _warp(self, lanes: list[Iterator[Any]]) -> None:
        arrived = [next(lane, None) for lane in lanes]
        while any(a is not None for a in arrived):
            (_, mask), *_ = arrived
            assert all(a is not None and a[1] == mask for a in arrived), "a shuffle or vote that not all threads of the warp reach"
            if mask is None:
                doubt = self.doubt and any(vote for vote, _ in arrived)
                self.votes += doubt
                arrived = [self._send(lane, doubt) for lane in lanes]
            else:
                arrived = [self._send(lane, arrived[i ^ mask][0]) for i, lane in enumerate(lanes)]

    @staticmethod
    def _send(lane: Any, value: Any) -> Any:
        try:
            return lane.send(value)
        except StopIteration:
            return None

    def _thread(self, special: dict[str, int]) -> Iterator[Any]:
        regs: dict[str, Any] = dict(special)

        def value(name: str) -> Any:
            if name in regs:
                return regs[name]
            if name[0] == "%":
                return 0xABABABAB  # half of a word may be undefined that is then shifted out
            return int(name[2:], 16) if name.startswith("0f") else int(name, 0)

        def names(operand: str) -> list[str]:
            return [n.strip() for n in operand.strip("{}").split(",")]

        def address(operand: str) -> int:
            base, _, offset = operand[1:-1].partition("+")
            return regs[base] + int(offset or 0)

        pc = 0
        while pc < len(self.code):
            predicate, op, parts, o = self.code[pc]
            pc += 1
            if predicate and regs[predicate.lstrip("!")] == predicate.startswith("!"):
                continue
            head, kind = parts[0], parts[-1]
            width = int(kind[1:]) if kind[1:].isdigit() else 0
            if head == "ret":
                return
            if head == "bra":
                pc = self.labels[o[0]]
            elif op.startswith("ld."):
                targets, size = names(o[0]), width // 8
                if "param" in op:
                    index, offset = re.search(r"_param_(\d+)\+?(\d*)", o[1]).groups()  # type: ignore[union-attr]
                    data = self.params[int(index)][int(offset or 0) :][: size * len(targets)]
                else:
                    data = self.memory.at(address(o[1]), size * len(targets)).tobytes()
                regs.update((n, int.from_bytes(data[i * size : i * size + size], "little")) for i, n in enumerate(targets))
            elif op.startswith("st."):
                mask = (1 << width) - 1
                data = b"".join((value(n) & mask).to_bytes(width // 8, "little") for n in names(o[1]))
                self.memory.at(address(o[0]), len(data))[:] = np.frombuffer(data, np.uint8)
            elif head == "shfl":
                assert parts[2] == "bfly", op
                regs[o[0]] = yield value(o[1]), value(o[2])
            elif head == "vote":
                assert op == "vote.sync.any.pred", op
                regs[o[0]] = yield regs[o[1]], None
            elif head == "mov" and "{" in o[0]:
                small = width // len(names(o[0]))
                regs.update((n, value(o[1]) >> small * i & (1 << small) - 1) for i, n in enumerate(names(o[0])))
            elif head == "mov" and "{" in o[1]:
                small = width // len(names(o[1]))
                regs[o[0]] = sum((value(n) & (1 << small) - 1) << small * i for i, n in enumerate(names(o[1])))
            elif head == "cvt":
                x = [value(n) for n in o[1:]]
                round_to = to_fp8 if "e4m3x2" in parts else to_bf16
                if op == "cvt.f32.bf16":
                    regs[o[0]] = x[0] << 16
                elif op == "cvt.f64.f32":
                    regs[o[0]] = struct.unpack("<Q", struct.pack("<d", f32(x[0])))[0]
                elif op == "cvt.rn.f32.f64":
                    with np.errstate(over="ignore"):
                        regs[o[0]] = bits32(np.float64(f64(x[0])))
                elif kind == "f32":
                    regs[o[0]] = sum(round_to(f32(b)) << (8 if round_to is to_fp8 else 16) * i for i, b in enumerate(reversed(x)))
                else:
                    to = int(parts[1][1:])
                    regs[o[0]] = (signed(x[0], width) if kind[0] == "s" else x[0] & (1 << width) - 1) & (1 << to) - 1
            elif head == "selp":
                regs[o[0]] = value(o[1]) if regs[o[3]] else value(o[2])
            elif head == "setp":
                read = {"f32": f32, "f64": f64}.get(kind) or (lambda b, w=width, k=kind: signed(b, w) if k[0] == "s" else b & (1 << w) - 1)
                result = COMPARE[parts[1]](read(value(o[1])), read(value(o[2])))
                regs[o[0]] = result and regs[o[3]] if "and" in parts else result or regs[o[3]] if "or" in parts else result
            elif kind == "pred":
                regs[o[0]] = bool(INTEGER[head](*(int(regs[n]) for n in o[1:])) & 1)
            elif kind == "f32":
                with np.errstate(all="ignore"):
                    regs[o[0]] = bits32(FLOAT[head](*(f32(value(n)) for n in o[1:])))
            elif kind == "f64":
                regs[o[0]] = struct.unpack("<Q", struct.pack("<d", double(op, *(f64(value(n)) for n in o[1:]))))[0]
            elif head != "griddepcontrol":
                to = 64 if "wide" in parts else width
                x = [
                    signed(value(n), w) if kind[0] == "s" else value(n) & (1 << w) - 1
                    for n, w in zip(o[1:], (width, width, to), strict=False)
                ]
                regs[o[0]] = INTEGER[head](*x) & (1 << to) - 1


def emulate(case: Case, ptx: str, doubt: bool = True) -> int:
    """Run the kernel on the CPU tensors of a case, which it writes; returns how often a warp was in doubt."""
    from lldecode_fused_query.kernel import WARPS

    memory = Memory()

    def tensor(x: Tensor, *dynamic: int) -> bytes:
        header = struct.pack("<Q", memory.address(x)) + b"".join(struct.pack("<i", x.shape[i]) for i in dynamic)
        header += b"\0" * (-len(header) % 8)
        return header + b"".join(struct.pack("<q", s) for s in x.stride()[:-1])

    heads, index_heads = case.q_pe.shape[1], 0 if case.index_q is None else case.index_q.shape[1]
    params = [tensor(case.positions, 0), tensor(case.q_pe, 0, 1), tensor(case.cos_sin, 0)]
    if case.ql_nope is not None:
        params.append(tensor(case.ql_nope, 0, 1))
    if case.mqa_output.dtype == FP8:
        params.append(tensor(case.q_scale.view(1)))
    params.append(tensor(case.mqa_output, 0, 1))
    if index_heads:
        params += [tensor(case.index_q, 0, 1), tensor(case.index_cos_sin, 0), tensor(case.index_weights, 0, 1)]
        params += [tensor(case.idx_q_fp8, 0, 1), tensor(case.idx_weights_out, 0, 1)]
    rope_begin = -(-index_heads // 4)
    nope_begin = rope_begin - (-heads // 4)
    work = nope_begin + (heads if case.ql_nope is not None else 0)
    params += [struct.pack("<f", case.scales["softmax_scale"]), struct.pack("<f", case.scales["head_scale"])]
    params += [struct.pack("<i", rope_begin), struct.pack("<i", nope_begin)]
    program = Program(ptx, doubt)
    program.run(params, (len(case.positions), -(-work // WARPS)), 32 * WARPS, memory)
    return program.votes


@pytest.fixture
def cases() -> Any:
    """The helpers of this file: ``--import-mode=importlib`` gives test modules no other way to them."""
    import types

    names = (make_case, run_reference, differences, as_bits, emulate, Program, f32, bits32)
    return types.SimpleNamespace(**{f.__name__: f for f in names})
