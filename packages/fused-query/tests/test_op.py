import pytest
import torch

from lldecode.testing import opcheck
from lldecode_fused_query import fused_query, op, supports

SHAPES = [(1, 1, 1), (3, 17, 5), (2, 8, 32), (5, 3, 0)]


@pytest.mark.parametrize("output", ["fp8", "bf16", "rope"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleave", [True, False])
def test_writes_the_reference_and_nothing_else(cases, shape, output, interleave):
    case = cases.make_case(*shape, output, interleave=interleave, q_scale=0.7, raw=True)
    padding = cases.as_bits(case.padding)
    assert supports(*case.call) is None
    fused_query(*case.args, **case.scales)
    assert cases.differences(case, cases.run_reference(case)) == [0] * len(case.outputs)
    assert torch.equal(cases.as_bits(case.padding), padding)


def test_is_close_to_plain_fp32(cases):
    case = cases.make_case(4, 3, 6, q_scale=0.25)
    fused_query(*case.args, **case.scales)
    cos, sin = case.cos_sin[case.positions][:, None].chunk(2, -1)

    def turn(x):
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    mqa = torch.cat([case.ql_nope.float(), turn(case.q_pe)], -1)
    torch.testing.assert_close(case.mqa_output.float() * 0.25, mqa, rtol=2**-4, atol=2**-9)
    row = torch.cat([turn(case.index_q[..., :64]), case.index_q[..., 64:].float()], -1)
    scale = case.idx_weights_out / (case.index_weights.float() * 128**-0.5 * 6**-0.5)
    torch.testing.assert_close(case.idx_q_fp8.float() * scale[..., None], row, rtol=2**-4, atol=2**-6)


@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 3, 0)])
def test_op_contract(cases, shape):
    case = cases.make_case(*shape, "bf16")
    tests = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    if shape[2]:  # torch's schema check cannot compare fp8 on a CPU
        torch.library.opcheck(torch.ops.lldecode.fused_query, case.call, test_utils=tests)
    else:
        opcheck(torch.ops.lldecode.fused_query, case.call)


def test_declares_what_it_mutates():
    schema = torch.ops.lldecode.fused_query.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["mqa_output", "idx_q_fp8", "idx_weights_out"]
    assert not schema.returns


@pytest.mark.parametrize("output", ["fp8", "bf16", "rope"])
def test_no_tokens(cases, output):
    case = cases.make_case(0, 4, 2, output)
    fused_query(*case.args, **case.scales)
    assert [len(x) for x in case.outputs] == [0, 0, 0]


def strided(x):
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]


REFUSALS = {
    "positions: expected torch.int32 or torch.int64, got torch.float32": lambda c: {"positions": c.positions.float()},
    "positions: expected shape [2], got [2, 1]": lambda c: {"positions": c.positions[:, None]},
    "q_pe: expected torch.bfloat16, got torch.float16": lambda c: {"q_pe": c.q_pe.half()},
    "q_pe: expected shape [2, 3, 64], got [2, 3, 32]": lambda c: {"q_pe": c.q_pe[..., :32]},
    "q_pe: expected shape [2, 1, 64], got [2, 0, 64]": lambda c: {"q_pe": c.q_pe[:, :0]},
    "q_pe: expected a last dimension of stride 1": lambda c: {"q_pe": strided(c.q_pe)},
    "q_pe: expected strides below 2 GiB": lambda c: {"positions": c.positions[:1], "q_pe": c.q_pe.as_strided((1, 3, 64), (2**30, 64, 1))},
    "cos_sin: expected torch.bfloat16 or torch.float32, got torch.float16": lambda c: {"cos_sin": c.cos_sin.half()},
    "ql_nope: expected shape [2, 3, 512], got [2, 3, 256]": lambda c: {"ql_nope": c.ql_nope[..., :256]},
    "q_scale: expected a tensor, got None": lambda c: {"q_scale": None},
    "q_scale: expected shape [1], got [2]": lambda c: {"q_scale": torch.ones(2)},
    "mqa_output: expected torch.float8_e4m3fn or torch.bfloat16": lambda c: {"mqa_output": c.mqa_output.float()},
    "mqa_output: expected torch.bfloat16, got torch.float8_e4m3fn": lambda c: {"ql_nope": None},
    "mqa_output: expected rows aligned to 16 bytes": lambda c: {
        "mqa_output": torch.empty(2 * 3 * 584, dtype=torch.uint8).view(op._FP8[0]).view(2, 3, 584)[..., 8:]
    },
    "index_cos_sin: expected torch.float32, got torch.bfloat16": lambda c: {"index_cos_sin": c.cos_sin.bfloat16()},
    "index_weights: expected shape [2, 4], got [2, 3]": lambda c: {"index_weights": c.index_weights[:, :3]},
    "index_weights: expected a tensor, got None": lambda c: {"index_weights": None},
    "idx_q_fp8: expected torch.float8_e4m3fn, got torch.uint8": lambda c: {"idx_q_fp8": c.idx_q_fp8.view(torch.uint8)},
    "idx_weights_out: expected device cpu, got meta": lambda c: {"idx_weights_out": c.idx_weights_out.to("meta")},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refuses(cases, reason):
    case = cases.make_case(2, 3, 4)
    before = [cases.as_bits(x) for x in case.outputs]
    args = dict(zip(vars(case), case.args, strict=False)) | REFUSALS[reason](case)
    assert supports(*args.values(), *case.call[11:]).startswith(reason)
    with pytest.raises(ValueError) as e:
        fused_query(**args, **case.scales)
    assert str(e.value).startswith(reason)
    assert all(torch.equal(cases.as_bits(x), b) for x, b in zip(case.outputs, before, strict=True))


def test_without_an_indexer_its_arguments_do_not_matter(cases):
    case = cases.make_case(2, 3, 4)
    before = cases.as_bits(case.idx_q_fp8)
    case.index_q = case.index_weights = None
    fused_query(*case.args, **case.scales)
    assert torch.equal(cases.as_bits(case.idx_q_fp8), before)
    assert cases.differences(case, [*cases.run_reference(case), case.idx_q_fp8, case.idx_weights_out]) == [0, 0, 0]


def test_traces_with_fake_tensors(cases):
    case = cases.make_case(2, 3, 4)
    expected = cases.run_reference(case)
    torch.compile(lambda *args: fused_query(*args, **case.scales), backend="eager", fullgraph=True)(*case.args)
    assert cases.differences(case, expected) == [0, 0, 0]
