"""On a GPU: bit for bit the reference."""

import itertools

import pytest
import torch

from lldecode.testing import graph_replay, poison
from lldecode_fused_query import fused_query, op, supports

pytestmark = pytest.mark.gpu

HEADS = [(64, 32), (16, 32), (8, 32), (128, 64), (16, 64)]


def to_cuda(case):
    """The case on the GPU, every view as strided as it was."""
    moved = {}

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if (key := storage.data_ptr()) not in moved:
            moved[key] = torch.empty(0, dtype=torch.uint8).set_(storage).cuda().untyped_storage()
        return torch.empty(0, dtype=x.dtype, device="cuda").set_(moved[key], x.storage_offset(), x.shape, x.stride())

    return type(case)(**{k: move(v) for k, v in vars(case).items()})


def check(cases, case):
    gpu = to_cuda(case)
    padding = cases.as_bits(gpu.padding)
    assert supports(*gpu.call) is None
    fused_query(*gpu.args, **gpu.scales)
    torch.cuda.synchronize()
    expected = cases.run_reference(gpu)
    assert cases.differences(gpu, expected) == [0] * len(expected)
    assert torch.equal(cases.as_bits(gpu.padding), padding)
    return gpu


def test_the_reference_is_the_same_on_both_devices(cases):
    case = cases.make_case(7, 9, 5, raw=True)
    on_gpu, on_cpu = cases.run_reference(to_cuda(case)), cases.run_reference(case)
    assert all(torch.equal(cases.as_bits(x).cpu(), cases.as_bits(y)) for x, y in zip(on_gpu, on_cpu, strict=True))


@pytest.mark.parametrize("output", ["fp8", "bf16", "rope"])
@pytest.mark.parametrize("heads", HEADS)
def test_exact_for_real_models(cases, heads, output):
    for tokens, interleave in itertools.product((1, 2, 4, 8, 16, 33, 64), (True, False)):
        check(cases, cases.make_case(tokens, *heads, output, interleave=interleave, seed=tokens))


@pytest.mark.parametrize("output", ["fp8", "bf16", "rope"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 17), (17, 63, 5), (129, 5, 0), (2, 129, 3)])
def test_exact_for_odd_shapes_and_any_bits(cases, shape, output):
    for interleave, table in itertools.product((True, False), (torch.float32, torch.bfloat16)):
        check(cases, cases.make_case(*shape, output, interleave=interleave, cos_sin=table, raw=True))


@pytest.mark.parametrize("q_scale", [2.0**-30, 1e-20, 0.37, 1 / 3, 3.0, 448.0, 2.0**40])
def test_exact_for_any_q_scale(cases, q_scale):
    check(cases, cases.make_case(4, 64, 0, q_scale=q_scale, raw=q_scale != 0.37))


@pytest.mark.parametrize("shift", [1, 2, 4])
@pytest.mark.parametrize("output", ["fp8", "bf16", "rope"])
def test_exact_off_alignment(cases, output, shift):
    check(cases, cases.make_case(5, 7, 9, output, shift=shift))


def test_int32_positions_and_a_prefill_batch(cases):
    case = cases.make_case(700, 8, 4)
    case.positions = case.positions.int()
    check(cases, case)


def test_no_tokens_launches_nothing(cases, monkeypatch):
    from lldecode_fused_query.kernel import KERNEL

    monkeypatch.setattr(KERNEL, "get", None)
    gpu = to_cuda(cases.make_case(0, 4, 2))
    fused_query(*gpu.args, **gpu.scales)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("output", ["fp8", "bf16"])
def test_pdl_changes_no_bit(cases, output, tokens):
    case = cases.make_case(tokens, 64, 32, output)
    gpu = to_cuda(case)
    fused_query(*gpu.args, **gpu.scales, pdl=True)
    assert cases.differences(gpu, [x.cuda() for x in cases.run_reference(case)]) == [0, 0, 0]


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_chain_with_pdl_reads_what_the_kernel_before_wrote(cases, tokens):
    """Each kernel lets the next one start before it has written anything: without the wait the next one reads the NaN."""
    case = to_cuda(cases.make_case(tokens, 128, 0, "rope"))
    outs = [torch.empty_like(case.q_pe, memory_format=torch.contiguous_format) for _ in range(40)]

    def chain(pdl):
        for x, out in zip([case.q_pe, *outs], outs, strict=False):
            fused_query(case.positions, x, case.cos_sin, None, None, out, pdl=pdl)

    chain(False)
    expected = [out.clone() for out in outs]
    chain(True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # kernels overlap only where the host does not hold them up
        chain(True)
    for _ in range(20):
        for out in outs:
            poison(out)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replay(cases, pdl):
    case, fresh = to_cuda(cases.make_case(8, 16, 32)), to_cuda(cases.make_case(8, 16, 32, seed=1))
    graph_replay(lambda *args: fused_query(*args, **case.scales, pdl=pdl), case.args, fresh.args)


def test_what_is_not_warm_is_refused_inside_a_capture(cases, monkeypatch):
    from lldecode_fused_query.kernel import KERNEL

    case = to_cuda(cases.make_case(2, 3, 4))
    fused_query(*case.args, **case.scales)
    monkeypatch.setattr(KERNEL, "_memory", {})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match="capture: expected a kernel compiled before it"):
            fused_query(*case.args, **case.scales)
        torch.empty(1, device="cuda").zero_()


def test_warm_up_covers_every_batch(cases, monkeypatch):
    from lldecode import jit

    op.warmup("fp8", True, True, torch.float32, torch.device("cuda", 0), False)
    compiled = jit.stats()["memory"]
    for tokens in (1, 3, 8, 17, 64, 300):
        gpu = to_cuda(cases.make_case(tokens, 64, 32))
        fused_query(*gpu.args, **gpu.scales)
    assert jit.stats()["memory"] == compiled


def test_deterministic(cases):
    case = cases.make_case(16, 64, 32, raw=True)
    a, b = check(cases, case), check(cases, case)
    assert all(torch.equal(cases.as_bits(x), cases.as_bits(y)) for x, y in zip(a.outputs, b.outputs, strict=True))


def test_op_contract(cases):
    gpu = to_cuda(cases.make_case(3, 5, 0, "bf16"))
    torch.library.opcheck(torch.ops.lldecode.fused_query, gpu.call)


def test_agrees_with_plain_torch_rounding(cases):
    """The reference is this package's; torch's own rounding to fp8 and bf16 is not."""
    gpu = check(cases, cases.make_case(4, 16, 0))
    torch.testing.assert_close(gpu.mqa_output[..., :512].float(), gpu.ql_nope.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)
