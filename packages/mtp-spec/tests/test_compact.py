"""The rows of top-k sharing: by themselves, and over proposals whose requests come and go."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lldecode_mtp_spec.compact import compact
from lldecode_mtp_spec.vllm_sharing import TopkSharing

TOKENS, TOPK, MAX_REQS = 32, 3, 6


def numbered(tokens: int) -> torch.Tensor:
    return torch.arange(tokens * TOPK, dtype=torch.int32).view(tokens, TOPK)


@given(rows=st.lists(st.integers(0, TOKENS - 1), max_size=MAX_REQS), spare=st.integers(0, 4))
def test_each_request_gets_its_row(rows: list[int], spare: int) -> None:
    """In any order, overlapping what is written, with repeats; the padded rows after them are -1 and the rest is left alone."""
    before, buffer = numbered(TOKENS), numbered(TOKENS)
    n, end = len(rows), len(rows) + spare
    compact(buffer, torch.tensor(rows, dtype=torch.int64), end)
    assert torch.equal(buffer[:n], before[rows])
    assert (buffer[n:end] == -1).all()
    assert torch.equal(buffer[end:], before[end:])


def test_a_buffer_of_fewer_rows_than_requests_can_be() -> None:
    buffer = numbered(4)
    compact(buffer, torch.tensor([3, 1]), 9)
    assert buffer.tolist() == [[9, 10, 11], [3, 4, 5], [-1] * 3, [-1] * 3]


def test_a_buffer_made_under_inference_mode() -> None:
    with torch.inference_mode():
        buffer = numbered(4)
    compact(buffer, torch.tensor([2]), 1)
    assert buffer[0].tolist() == [6, 7, 8]


class Predictor:
    """MTP layers with a top-k buffer each, or one for all of them."""

    def __init__(self, *buffers: torch.Tensor) -> None:
        attentions = [SimpleNamespace(topk_indices_buffer=b, skip_topk=False) for b in buffers]
        self.layers = {str(i): SimpleNamespace(mtp_block=SimpleNamespace(self_attn=a)) for i, a in enumerate(attentions)}

    def set_skip_topk(self, skip: bool) -> None:
        for layer in self.layers.values():
            layer.mtp_block.self_attn.skip_topk = skip


def sharing(*buffers: torch.Tensor) -> TopkSharing:
    speculator = SimpleNamespace(last_token_indices=torch.zeros(MAX_REQS, dtype=torch.int64), max_num_reqs=MAX_REQS)
    return TopkSharing(speculator, Predictor(*buffers))


requests = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 4)),  # name, tokens, rejected drafts
    min_size=1,
    max_size=MAX_REQS,
    unique_by=lambda r: r[0],
)


@given(proposals=st.lists(requests, min_size=1, max_size=6))
def test_rows_follow_the_requests(proposals: list[list[tuple[int, int, int]]]) -> None:
    """Whoever joins, leaves or changes place: in the later steps a row is the top-k of its own request's last accepted token."""
    buffer = torch.full((TOKENS, TOPK), 7, dtype=torch.int32)
    hooks = sharing(buffer)
    for serial, batch in enumerate(proposals):
        hooks.on_prefill_begin(len(batch))
        row, expected = 0, []
        for i, (name, tokens, rejected) in enumerate(batch):
            accepted = max(tokens - rejected, 1)
            for t in range(tokens):  # step 0 gives every token a row of its own
                buffer[row + t] = torch.tensor([serial, name, t], dtype=torch.int32)
            hooks.speculator.last_token_indices[i] = row + accepted - 1
            expected.append([serial, name, accepted - 1])
            row += tokens
        hooks.speculator.last_token_indices[len(batch) :] = 0  # as vLLM pads it
        hooks.on_prefill_end(len(batch))
        hooks.on_multi_step_decode_begin(len(batch))
        for _ in range(2):
            assert buffer[: len(batch)].tolist() == expected
            assert (buffer[len(batch) : MAX_REQS] == -1).all()
        hooks.on_multi_step_decode_end(len(batch))


@pytest.mark.parametrize("shared", [True, False])
def test_each_buffer_is_compacted_once(shared: bool) -> None:
    first = numbered(TOKENS)
    second = first if shared else numbered(TOKENS)
    hooks = sharing(first, second)
    hooks.speculator.last_token_indices[:2] = torch.tensor([1, 3])
    hooks.on_prefill_end(2)
    for buffer in (first, second):
        assert buffer[:2].tolist() == [[3, 4, 5], [9, 10, 11]]  # a second time the first row would be the second's


def test_reuse_is_on_between_the_decode_hooks_alone() -> None:
    hooks = sharing(numbered(TOKENS))
    attention = hooks.predictor.layers["0"].mtp_block.self_attn
    states = []
    for hook in (hooks.on_prefill_begin, hooks.on_prefill_end, hooks.on_multi_step_decode_begin, hooks.on_multi_step_decode_end):
        hook(1)
        states.append(attention.skip_topk)
    assert states == [False, False, True, False]
    attention.skip_topk = True
    hooks.on_prefill_begin(1)
    assert not attention.skip_topk
