"""Runs the PTX of the kernel on a CPU: every thread of a launch in lockstep, one numpy element a thread.

It knows the instructions that this kernel compiles to and refuses any other. Three things are stricter than the hardware: every
access to global memory is checked against the tensors' bounds, a copy of cp.async happens as late as the waits allow and poisons its
destination until then, and nothing of x may be read, nor anything written, before griddepcontrol.wait.
"""

import re
from typing import Any

import numpy as np
import torch

_SIGNED = {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
_BITS = {"u8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}
_KIND = {**_SIGNED, **_BITS, "f32": np.float32}
_POLICY = np.uint64(1)  # whatever createpolicy makes
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_STEP = 1 << 40  # between the addresses of two tensors


def lines_of(ptx: str) -> list[str]:
    body = ptx[ptx.index("{", ptx.index(".reqntid") if ".reqntid" in ptx else 0) + 1 : ptx.rindex("}")]
    out = []
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if not line or line.startswith("."):
            continue
        # inline PTX: braces of a scope with a predicate and a size of its own
        line = re.sub(r"^\{\s*(\.reg[^;]*;\s*)+", "", line)
        line = re.sub(r";\s*\}$", ";", line)
        out += [part.strip() for part in line.split(";") if part.strip() and not part.strip().startswith(".reg")]
    return out


class Machine:
    """A launch of one compiled kernel.

    Args:
        tensors: in the order of the kernel's parameters: name and a tensor [B, R, C] with dense rows; only ``y`` is written.
    """

    def __init__(
        self, ptx: str, grid: tuple[int, int, int], threads: int, cluster: int, smem: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.lines, self.threads, self.cluster, self.smem_bytes = lines_of(ptx), threads, cluster, smem
        ctas = np.arange(grid[0] * grid[1] * grid[2])
        one = np.ones(threads, dtype=np.uint32)
        self.cta = np.repeat(ctas, threads)
        self.special = {
            "%tid.x": np.tile(np.arange(threads, dtype=np.uint32), len(ctas)),
            "%nctaid.x": np.full(len(self.cta), grid[0], dtype=np.uint32),
            "%ctaid.x": np.kron((ctas % grid[0]).astype(np.uint32), one),
            "%ctaid.y": np.kron((ctas // grid[0] % grid[1]).astype(np.uint32), one),
            "%ctaid.z": np.kron((ctas // (grid[0] * grid[1])).astype(np.uint32), one),
        }
        self.n = len(self.cta)
        self.smem = np.full((len(ctas), smem), 0xFF, dtype=np.uint8)  # NaN
        self.names = list(tensors)
        self.memory = {}
        self.params: list[bytes] = []
        for i, (name, t) in enumerate(tensors.items()):
            storage = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
            self.memory[name] = storage.numpy()
            base = (i + 1) * _STEP + 2 * t.storage_offset()
            self.params.append(
                np.uint64(base).tobytes() + np.array([*t.shape, 0], np.int32).tobytes() + np.array(t.stride()[:2], np.int64).tobytes()
            )
            allowed = torch.zeros(storage.numel() // 2, dtype=torch.bool)
            torch.as_strided(allowed, t.shape, t.stride(), t.storage_offset()).fill_(True)
            self.memory[name + "?"] = allowed.repeat_interleave(2).numpy()
        self.registers: dict[str, Any] = {}
        self.waited = not any("griddepcontrol.wait" in line for line in self.lines)
        self.open: list[tuple[Any, ...]] = []
        self.groups: list[list[tuple[Any, ...]]] = []
        self.expected = np.zeros(len(ctas), dtype=np.int64)

    # operands

    def value(self, text: str, kind: str) -> Any:
        dtype = _KIND[kind]
        text = text.strip()
        if text in self.special:
            return self.special[text].astype(dtype)
        if text in self.registers:
            found = self.registers[text]
            if np.dtype(dtype).itemsize == found.dtype.itemsize:
                return found.view(dtype)
            return found.astype(dtype)
        if text == "__dynamic_shmem__0":
            return np.zeros(self.n, dtype=dtype)
        if text.startswith("0f"):
            return np.full(self.n, np.frombuffer(bytes.fromhex(text[2:])[::-1], np.float32)[0])
        return np.full(self.n, int(text, 0)).astype(dtype)

    def put(self, name: str, value: Any, mask: Any) -> None:
        old = self.registers.get(name)
        if old is None or old.dtype.itemsize != value.dtype.itemsize:
            old = np.zeros(self.n, dtype=value.dtype)
        self.registers[name] = np.where(mask, value, old.view(value.dtype))

    def address(self, text: str, kind: str = "u64") -> Any:
        base, _, offset = text.strip("[] ").partition("+")
        return self.value(base, kind) + _KIND[kind](int(offset or 0))

    # memory

    def load(self, address: Any, size: int, mask: Any, write: bool = False, why: str = "load") -> tuple[np.ndarray, Any]:
        """Which tensor each active thread reaches, checked, and its byte offset."""
        which, offset = (address >> np.uint64(40)).astype(np.int64) - 1, (address & np.uint64(_STEP - 1)).astype(np.int64)
        for i, name in enumerate(self.names):
            at = offset[mask & (which == i)]
            ok = self.memory[name + "?"]
            if len(at):
                assert at.max() + size <= len(ok), f"{why}: {name}: past the end"
                assert all(ok[at + b].all() for b in range(size)), f"{why}: outside of {name}"
                assert (name == "y") == write, f"{why}: {name}"
                assert self.waited or name == "w", f"{why}: {name} before griddepcontrol.wait"
                assert size < 16 or not (at % 16).any(), f"{why}: {name}: misaligned"
        assert not mask.any() or set(np.unique(which[mask])) <= set(range(len(self.names))), f"{why}: wild address"
        return which, offset

    def fetch(self, address: Any, size: int, mask: Any, why: str) -> np.ndarray:
        which, offset = self.load(address, size, mask, why=why)
        out = np.zeros((self.n, size), dtype=np.uint8)
        for i, name in enumerate(self.names):
            hit = mask & (which == i)
            out[hit] = self.memory[name][offset[hit][:, None] + np.arange(size)]
        return out

    def shared(self, address: Any, size: int, mask: Any) -> tuple[Any, Any]:
        at = address.astype(np.int64)[mask]
        assert not len(at) or (at.min() >= 0 and at.max() + size <= self.smem_bytes), "shared memory: out of bounds"
        assert not (at % size).any(), "shared memory: misaligned"
        return self.cta[mask][:, None], at[:, None] + np.arange(size)

    # execution

    def run(self) -> None:
        at_label = {line[:-1]: i for i, line in enumerate(self.lines) if line.endswith(":")}
        resume = np.zeros(self.n, dtype=np.int64)  # a thread sleeps until its line
        pc = -1
        while pc + 1 < len(self.lines):
            pc += 1
            line = self.lines[pc]
            mask = active = resume <= pc
            if line.endswith(":") or not mask.any():
                continue
            if m := re.match(r"again: mbarrier\.try_wait", line):
                assert (self.expected[np.unique(self.cta[mask])] == 0).all(), "the barrier would never complete"
                continue
            if m := re.match(r"@!p bra again", line):
                continue
            if m := re.match(r"@(!?)(%?\w+)\s+(.*)", line):
                taken = self.registers[m[2]].astype(bool)
                mask, line = mask & (~taken if m[1] else taken), m[3]
            name, _, rest = line.partition(" ")
            operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
            if name.startswith("bra"):
                target = at_label[operands[0]]
                if target > pc:
                    resume[mask] = target
                else:
                    if not mask.any():
                        continue
                    assert np.array_equal(mask, active), "a loop that not every thread goes round"
                    resume[mask] = target
                    pc = target - 1
            elif name == "ret":
                resume[mask] = 1 << 60
            else:
                self.execute(name, operands, mask, active)

    def execute(self, name: str, o: list[str], mask: Any, active: Any) -> None:
        op, *suffix = name.split(".")
        kind = next((s for s in reversed(suffix) if s in _KIND), "")
        if op == "mma":
            self.mma(o, suffix[-2])
        elif name.startswith("ld.param"):
            at = re.match(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", o[1])
            assert at
            raw, size = self.params[int(at[1])], np.dtype(_KIND[kind]).itemsize
            for i, register in enumerate(r.strip() for r in o[0].strip("{}").split(",")):
                found = np.frombuffer(raw, _KIND[kind], 1, int(at[2] or 0) + i * size)[0]
                self.put(register, np.full(self.n, found), mask)
        elif name.startswith("ld.global.v4") or name.startswith("ld.shared.v4"):
            if "global" in name:
                data = self.fetch(self.address(o[1]), 16, mask, "load")
            else:
                data = np.zeros((self.n, 16), dtype=np.uint8)
                data[mask] = self.smem[self.shared(self.address(o[1], "u32"), 16, mask)]
            for i, register in enumerate(r.strip() for r in o[0].strip("{}").split(",")):
                self.put(register, data.view(np.uint32)[:, i].copy(), mask)
        elif name.startswith("ld.global"):
            size = np.dtype(_KIND[kind]).itemsize
            self.put(o[0], self.fetch(self.address(o[1]), size, mask, "load").view(_KIND[kind])[:, 0].copy(), mask)
        elif name.startswith("st.global"):
            size = np.dtype(_KIND[kind]).itemsize
            _, offset = self.load(self.address(o[0]), size, mask, write=True, why="store")
            hit = offset[mask]
            assert len(np.unique(hit)) == len(hit), "two threads store one element"
            self.memory["y"][hit[:, None] + np.arange(size)] = self.value(o[1], kind)[mask].copy().view(np.uint8).reshape(-1, size)
        elif name.startswith("ld.shared"):
            data = np.zeros((self.n, 4), dtype=np.uint8)
            data[mask] = self.smem[self.shared(self.address(o[1], "u32"), 4, mask)]
            self.put(o[0], data.view(np.uint32)[:, 0].copy(), mask)
        elif name.startswith("st.shared"):
            self.smem[self.shared(self.address(o[0], "u32"), 4, mask)] = self.value(o[1], "b32")[mask].copy().view(np.uint8).reshape(-1, 4)
        elif name.startswith("st.async"):
            target = self.address(o[0], "u32")
            peer, at = (target >> np.uint32(24)).astype(np.int64)[mask], (target & np.uint32(0xFFFFFF)).astype(np.int64)[mask]
            cta = self.cta[mask] // self.cluster * self.cluster + peer
            self.smem[cta[:, None], at[:, None] + np.arange(4)] = self.value(o[1], "b32")[mask].copy().view(np.uint8).reshape(-1, 4)
            np.subtract.at(self.expected, cta, 4)
        elif name.startswith("mapa"):
            rank = self.value(o[2], "u32")
            assert (rank[mask] < self.cluster).all(), "mapa: no such CTA"
            self.put(o[0], self.value(o[1], "u32") | (rank << np.uint32(24)), mask)
        elif name.startswith("cp.async.cg"):
            to, source = self.address(o[0], "u32"), self.address(o[1])
            size = self.value(o[3], "u32")
            assert (self.value(o[4], "u64")[mask] == _POLICY).all(), "cp.async: not the cache policy"
            self.smem[self.shared(to, 16, mask)] = 0xFF
            self.open.append((to, source, mask, size))
        elif name.startswith("cp.async.commit"):
            self.groups.append(self.open)
            self.open = []
        elif name.startswith("cp.async.wait"):
            while len(self.groups) > int(o[0]):
                for to, source, mask, size in self.groups.pop(0):
                    data = np.zeros((self.n, 16), dtype=np.uint8)
                    full = mask & (size == 16)
                    data[full] = self.fetch(source, 16, full, "cp.async")[full]
                    self.smem[self.shared(to, 16, mask)] = data[mask]
        elif name == "griddepcontrol.wait":
            assert mask.all(), "griddepcontrol.wait: not by every thread"
            self.waited = True
        elif name.startswith("mbarrier.init"):
            assert (self.value(o[1], "u32")[mask] == 1).all() and len(np.unique(self.cta[mask])) == len(self.smem)
        elif name.startswith("mbarrier.arrive.expect_tx"):
            self.expected[self.cta[mask]] = self.value(o[2], "u32")[mask]
        elif op in ("barrier", "bar"):
            assert active.all(), f"{name}: not by every thread"
        elif op == "createpolicy":
            self.put(o[0], np.full(self.n, _POLICY), mask)
        elif op in ("fence", "griddepcontrol"):
            pass
        else:
            self.put(o[0], self.compute(op, suffix, kind, o[1:]), mask)

    def compute(self, op: str, suffix: list[str], kind: str, o: list[str]) -> Any:
        if suffix == ["pred"]:
            return self.registers[o[0]] if o[0] in self.registers else np.full(self.n, int(o[0], 0)).astype(bool)

        def get(i: int) -> Any:
            return self.value(o[i], kind)

        if op == "setp":
            found = _COMPARE[suffix[0]](get(0), get(1))
            return found & self.registers[o[2]].astype(bool) if suffix[1] == "and" else found
        if op == "selp":
            return np.where(self.registers[o[2]].astype(bool), get(0), get(1))
        if op in ("and", "or") and kind == "":
            a, b = (self.registers[x].astype(bool) for x in o)
            return a & b if op == "and" else a | b
        if op == "prmt":
            pair = self.value(o[0], "u32").astype(np.uint64) | (self.value(o[1], "u32").astype(np.uint64) << np.uint64(32))
            out = np.zeros(self.n, np.uint32)
            for byte in range(4):
                pick = np.uint64(8 * (int(o[2], 0) >> (4 * byte) & 7))
                out |= ((pair >> pick) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * byte)
            return out
        if op == "cvt":
            source = suffix[-1]
            if "f32" in suffix:  # to or from the 16-bit type
                half = torch.bfloat16 if "bf16" in suffix else torch.float16
                if source == "f32":
                    return torch.from_numpy(self.value(o[0], "f32").copy()).to(half).view(torch.int16).numpy().view(np.uint16)
                return torch.from_numpy(self.value(o[0], "b16").copy().view(np.int16)).view(half).float().numpy()
            return self.value(o[0], source).astype(_KIND[suffix[-2]])
        if op in ("mul", "mad") and suffix[0] in ("wide", "hi"):
            wide = {2: np.int64, 4: np.int64}[np.dtype(_KIND[kind]).itemsize]
            product = get(0).astype(wide) * get(1).astype(wide)
            bits = 8 * np.dtype(_KIND[kind]).itemsize
            if suffix[0] == "hi":
                return (product >> bits).astype(_KIND[kind])
            return product.astype(_KIND[kind[0] + str(2 * bits)])
        with np.errstate(over="ignore", invalid="ignore"):
            match op:
                case "mov":
                    return get(0)
                case "neg":
                    return -get(0)
                case "not":
                    return ~get(0)
                case "add":
                    return get(0) + get(1)
                case "sub":
                    return get(0) - get(1)
                case "mul":
                    return get(0) * get(1)
                case "mad":
                    return get(0) * get(1) + get(2)
                case "min" | "max":
                    return (np.minimum if op == "min" else np.maximum)(get(0), get(1))
                case "and":
                    return get(0) & get(1)
                case "or":
                    return get(0) | get(1)
                case "xor":
                    return get(0) ^ get(1)
                case "shl":
                    return get(0) << self.value(o[1], "u32").astype(_KIND[kind])
                case "shr":
                    return get(0) >> self.value(o[1], "u32").astype(_KIND[kind])
        raise NotImplementedError(f"{op}.{'.'.join(suffix)} {o}")

    def mma(self, o: list[str], half: str) -> None:
        """m16n8k16, from the fragment layouts of the PTX ISA, section "Matrix Fragments for mma.m16n8k16"."""
        d, a, b, c = ([r.strip() for r in x.strip("{}").split(",")] for x in o)

        def halves(register: str) -> np.ndarray:
            pairs = torch.from_numpy(self.value(register, "b32").copy().view(np.int16).reshape(-1, 32, 2))
            return pairs.view(torch.bfloat16 if half == "bf16" else torch.float16).float().numpy()

        lane = np.arange(32)
        g, t = lane // 4, lane % 4
        warps = self.n // 32
        A, B, C = (np.zeros((warps, *s), dtype=np.float32) for s in ((16, 16), (16, 8), (16, 8)))
        for i, register in enumerate(a):
            for e in range(2):
                A[:, g + 8 * (i % 2), 2 * t + e + 8 * (i // 2)] = halves(register)[:, :, e]
        for i, register in enumerate(b):
            for e in range(2):
                B[:, 2 * t + e + 8 * i, g] = halves(register)[:, :, e]
        for i, register in enumerate(c):
            C[:, g + 8 * (i // 2), 2 * t + i % 2] = self.value(register, "f32").reshape(-1, 32)
        with np.errstate(over="ignore", invalid="ignore"):
            D = C + A @ B
        for i, register in enumerate(d):
            self.registers[register] = D[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1).copy()
