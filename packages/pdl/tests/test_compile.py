"""What the kernels compile to: PDL instructions, the order of wait and loads, spills. No GPU is needed."""

import functools
import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lldecode.testing import Compiled, disassemble
from lldecode_pdl import kernel

ARCHS = [90, 100, 103]

NORM_ROPE: dict[str, Any] = {
    **dict.fromkeys(("pos_ptr", "slot_ptr"), "*i64"),
    **dict.fromkeys(("q_ptr", "q_w_ptr", "q_out_ptr", "kv_ptr", "kv_w_ptr", "pe_ptr", "k_ptr"), "*bf16"),
    **dict.fromkeys(("cos_sin_ptr", "k_cos_sin_ptr", "mla_scale_ptr", "k_w_ptr", "k_b_ptr"), "*fp32"),
    **dict.fromkeys(("mla_ptr", "k_cache_ptr"), "*u8"),
    **dict.fromkeys(("q_eps", "kv_eps", "k_eps"), "fp32"),
    "topk_ptr": "*i32",
    **{"Q_DIM": 2048, "Q_BLOCK": 2048, "KV_DIM": 512, "KV_HALF": 32, "MLA_BLOCK_SIZE": 64, "DS_MLA": True},
    **{"K_BLOCK_SIZE": 64, "K_HALF": 32, "INTERLEAVE": True, "TOPK": 2048, "TOPK_BLOCK": 2048},
}
EH_NORM: dict[str, Any] = {
    **dict.fromkeys(("embeds_ptr", "hidden_ptr", "enorm_ptr", "hnorm_ptr", "out_ptr"), "*bf16"),
    **{"pos_ptr": "*i64", "eps": "fp32", "DIM": 7168, "BLOCK": 8192},
}
CONVERT: dict[str, Any] = {
    **dict.fromkeys(("req_ptr", "table_ptr", "index_ptr", "out_ptr", "count_ptr", "workspace_req_ptr", "workspace_start_ptr"), "*i32"),
    **{"BLOCK_SIZE": 64, "TOPK": 2048, "BLOCK": 2048},
}
NO_INDEXER = dict.fromkeys(("k_ptr", "k_w_ptr", "k_b_ptr", "k_cos_sin_ptr", "k_cache_ptr", "topk_ptr"))
# kernel, its arguments, warps, and the arguments that no kernel of a decode step writes
CASES = {
    "norm-rope-ds-mla-interleaved": (kernel.fused_norm_rope_kernel, NORM_ROPE, 4, {"q_w_ptr", "kv_w_ptr", "k_w_ptr", "k_b_ptr"}),
    "norm-rope-fp8-neox": (
        kernel.fused_norm_rope_kernel,
        NORM_ROPE | {"DS_MLA": False, "INTERLEAVE": False, "Q_DIM": 1536},
        4,
        {"q_w_ptr", "kv_w_ptr", "k_w_ptr", "k_b_ptr"},
    ),
    "norm-rope-no-indexer": (kernel.fused_norm_rope_kernel, NORM_ROPE | NO_INDEXER, 4, {"q_w_ptr", "kv_w_ptr"}),
    "norm-rope-profile-run": (
        kernel.fused_norm_rope_kernel,
        NORM_ROPE | {"slot_ptr": None, "mla_ptr": None, "k_cache_ptr": None},
        4,
        {"q_w_ptr", "kv_w_ptr", "k_w_ptr", "k_b_ptr"},
    ),
    "eh-norm": (kernel.fused_eh_norm_kernel, EH_NORM, 8, {"enorm_ptr", "hnorm_ptr"}),
    "convert": (kernel.convert_req_index_kernel, CONVERT, 8, set()),
    "convert-decode": (kernel.convert_req_index_kernel, CONVERT | dict.fromkeys(("workspace_req_ptr", "workspace_start_ptr")), 8, set()),
}


@functools.cache
def build(case: str, arch: int, pdl: bool) -> tuple[Compiled, list[str]]:
    """What `case` compiles to, and the names of its PTX parameters."""
    function, known, warps, _ = CASES[case]
    types = {name: known.get(name, pdl if name == "USE_PDL" else None if name in known else "i32") for name in function.arg_names}
    constant = {i: v for i, (name, v) in enumerate(types.items()) if not isinstance(v, str)}
    signature = {name: v if isinstance(v, str) else "constexpr" for name, v in types.items()}
    aligned: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i, v in enumerate(signature.values()) if v[0] in "*i"}
    source = ASTSource(function, signature, {(i,): v for i, v in constant.items()}, aligned)
    options = {"num_warps": warps, **({"launch_pdl": True} if pdl else {})}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.metadata.launch_pdl is pdl
    return disassemble(compiled.asm["ptx"], compiled.asm["cubin"]), [n for n, v in signature.items() if v != "constexpr"]


Block = list[str]


def blocks(lines: list[str], label: str, branch: str, end: str) -> tuple[list[Block], list[list[int]]]:
    """Basic blocks and the successors of each; the expressions find a label, a branch's target, and an exit."""
    found: list[Block] = [[]]
    names: dict[str, int] = {}
    for line in lines:
        if m := re.match(label, line):
            found.append([])
            names[m[1]] = len(found) - 1
        else:
            found[-1].append(line)
            if re.search(branch, line):
                found.append([])
    successors = []
    for i, block in enumerate(found):
        last = block[-1] if block else ""
        target = re.search(branch, last)
        conditional = bool(re.match(r"@|BRA\.U !?UP\d", last))
        out = [names[target[1]]] if target else []
        if (not target or conditional) and not (re.search(end, last) and not conditional) and i + 1 < len(found):
            out.append(i + 1)
        successors.append(out)
    return found, successors


def before_wait(found: list[Block], successors: list[list[int]], wait: str) -> list[str]:
    """Instructions that some path reaches without having waited, in text order."""
    reached, todo, out = set(), [0], set()
    while todo:
        i = todo.pop()
        if i in reached:
            continue
        reached.add(i)
        for n, line in enumerate(found[i]):
            if re.search(wait, line):
                break
            out.add((i, n))
        else:
            todo += successors[i]
    return [found[i][n] for i, n in sorted(out)]


def ptx_before_wait(ptx: str) -> list[str]:
    lines = [line.strip() for line in ptx[ptx.index("{") :].splitlines()]
    lines = [line for line in lines if line and not line.startswith(("//", ".", "$L__tmp"))]
    return before_wait(*blocks(lines, r"(\$L\w+):", r"bra(?:\.uni)?\s+(\$L\w+);", r"\bret;"), r"griddepcontrol\.wait")


def sass_before_wait(sass: str) -> list[str]:
    code = re.findall(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.M)
    lines = [label + ":" if label else text for label, text in code]
    return before_wait(*blocks(lines, r"(\.L_x_\d+):", r"\bBRA\b.*?(\.L_x_\d+)", r"\bEXIT\b"), r"\bACQBULK\b")


def parameters(ptx: str, names: list[str]) -> dict[str, set[str]]:
    """By register, the kernel's arguments that its value is computed from; a loaded value is computed from none."""
    origin: dict[str, set[str]] = {}
    for line in ptx.splitlines():
        m = re.match(r"\s*(?:@!?%p\d+\s+)?([\w.]+)\s+(.*);", line)
        if not m or m[1].startswith(("st.", "bra", "bar")):
            continue
        registers = re.findall(r"%\w+", m[2])
        if m[1].startswith("ld.param"):
            origin[registers[0]] = {names[int(n)] for n in re.findall(r"_param_(\d+)", m[2]) if int(n) < len(names)}
        elif not m[1].startswith("ld.") and registers:
            origin[registers[0]] = set().union(*(origin.get(r, set()) for r in registers[1:]))
    return origin


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(case: str, arch: int) -> None:
    assert build(case, arch, True)[0].local_bytes == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_only_weights_are_read_before_the_wait(case: str, arch: int) -> None:
    compiled, names = build(case, arch, True)
    early = ptx_before_wait(compiled.ptx)
    origin = parameters(compiled.ptx, names)
    read = set()
    for line in early:
        assert not re.search(r"\b(st|red|atom)\.global|\bret;", line), f"before the wait: {line}"
        if "ld.global" in line:
            (address,) = re.findall(r"\[ (%\w+)", line)
            read |= {name for name in origin[address] if name.endswith("_ptr")}
    weights = CASES[case][3] & set(names)
    # without slots nothing is cached, and the weights of what is cached are not needed
    assert read == (weights & {"q_w_ptr"} if case == "norm-rope-profile-run" else weights)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_assembler_moves_nothing_before_the_wait(case: str, arch: int) -> None:
    compiled, _ = build(case, arch, True)
    assert "ACQBULK" in compiled.sass and "PREEXIT" in compiled.sass
    early = sass_before_wait(compiled.sass)
    assert sum("LDG" in line for line in early) == sum("ld.global" in line for line in ptx_before_wait(compiled.ptx))
    assert not any(re.search(r"\b(STG|RED|ATOMG|ST\.E)\b", line) for line in early)


@pytest.mark.parametrize("case", CASES)
def test_dependents_start_first_and_only_with_pdl(case: str) -> None:
    early = ptx_before_wait(build(case, 90, True)[0].ptx)
    kinds = [k for line in early for k in re.findall(r"griddepcontrol\.\w+|ld\.global", line)]
    assert kinds[0] == "griddepcontrol.launch_dependents"
    assert "griddepcontrol" not in build(case, 90, False)[0].ptx


@pytest.mark.parametrize("case", ["norm-rope-ds-mla-interleaved", "eh-norm", "convert"])
def test_rows_are_read_and_written_in_16_bytes(case: str) -> None:
    ptx = build(case, 90, True)[0].ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def test_the_analysis_finds_a_late_wait() -> None:
    late = """{
ld.param.b64 %rd1, [k_param_0];
@%p1 bra $L__BB0_2;
griddepcontrol.wait;
bra.uni $L__BB0_3;
$L__BB0_2:
ld.global.b32 { %r1 }, [ %rd1 + 0 ];
$L__BB0_3:
ld.global.b32 { %r2 }, [ %rd1 + 0 ];
ret;
}"""
    assert [line for line in ptx_before_wait(late) if "ld.global" in line or "ret" in line] == [
        "ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
        "ld.global.b32 { %r2 }, [ %rd1 + 0 ];",
        "ret;",
    ]
    assert parameters(late, ["x_ptr"])["%rd1"] == {"x_ptr"}
