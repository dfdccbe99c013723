import torch

from lldecode.feature import Context, declined
from lldecode_example_noun.vllm import NAME, adapter, probe


def test_probe_gives_a_reason():
    assert probe(Context(((9, 0),))) is None
    assert probe(Context()) == "no CUDA device"
    assert "got 12.0" in (probe(Context(((12, 0),))) or "")


def test_an_unsupported_input_calls_the_original_once():
    calls: list[torch.Tensor] = []
    replaced = adapter(calls.append)
    assert torch.equal(replaced(torch.ones(2)), torch.full((2,), 2.0)) and not calls
    replaced(torch.ones(2, dtype=torch.int64))
    assert len(calls) == 1
    assert declined()[NAME] == {"x: expected a floating-point dtype, got torch.int64": 1}
