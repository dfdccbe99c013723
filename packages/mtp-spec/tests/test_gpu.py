"""On a GPU: what is kept and what is compacted inside CUDA graphs that share a memory pool."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lldecode_mtp_spec.compact import compact
from lldecode_mtp_spec.vllm import ARCHS, FEATURE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ARCHS, reason="needs a GPU of a proven architecture"
    ),
]

TOPK, BLOCK_SIZE, WIDTH = 2048, 64, 700
INDEXER = "vllm.models.deepseek_v32.nvidia.attention:sparse_attn_indexer"
CONVERT = "vllm.v1.attention.backends.mla.flashmla_sparse:triton_convert_req_index_to_global_index"
WITH_INDEXER = (0, 1, 2, 6, 10)
LAYERS = 12


def captured(call: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """After a warm-up, as vLLM captures: each kernel compiles outside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, stream=stream):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@pytest.mark.parametrize("requests", [1, 4, 63])
def test_compaction_in_a_graph(requests: int) -> None:
    """Replays on other rows and another buffer's contents; the graph reads both where they are."""

    def fresh(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, 256, (requests,), generator=generator).sort().values
        return torch.randint(-1, 100_000, (256, TOPK), dtype=torch.int32, generator=generator).cuda(), rows.cuda()

    buffer, rows = fresh(0)
    graph = captured(lambda: compact(buffer, rows, 64))
    for seed in (1, 2, 3):
        new_buffer, new_rows = fresh(seed)
        buffer.copy_(new_buffer)
        rows.copy_(new_rows)
        graph.replay()
        assert torch.equal(buffer[:requests], new_buffer[new_rows])
        assert (buffer[requests:64] == -1).all()
        assert torch.equal(buffer[64:], new_buffer[64:])


class Pass:
    """A forward pass of layers that only convert: `sources` holds what each layer's indexer selects, `slots` what each attends to."""

    def __init__(self, tokens: int, buffer: torch.Tensor, on: bool) -> None:
        from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index as convert

        wraps = {p.target: p.wrap for p in FEATURE.patches}
        self.tokens, self.buffer, self.conversions = tokens, buffer, 0
        self.sources = torch.empty(LAYERS, tokens, TOPK, dtype=torch.int32, device="cuda")
        self.slots = torch.empty_like(self.sources)
        self.counts = torch.empty(LAYERS, tokens, dtype=torch.int32, device="cuda")
        self.req_id = torch.arange(tokens, dtype=torch.int32, device="cuda")
        self.block_table = torch.empty(tokens, WIDTH, dtype=torch.int32, device="cuda")

        @functools.wraps(convert)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.conversions += 1
            return convert(*args, **kwargs)

        self.convert = wraps[CONVERT](counted) if on else counted
        self.indexer = wraps[INDEXER](self.select) if on else self.select

    def select(self, layer: int, *args: Any, **_: Any) -> torch.Tensor:
        buffer = args[12]
        buffer[: self.tokens].copy_(self.sources[layer])
        return buffer

    def fill(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.sources.random_(-1, WIDTH * BLOCK_SIZE, generator=generator)
        self.block_table.random_(0, 10_000, generator=generator)

    def __call__(self) -> None:
        from vllm.forward_context import ForwardContext, override_forward_context

        with override_forward_context(ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})):
            for i in range(LAYERS):
                if i in WITH_INDEXER:
                    self.indexer(i, *[None] * 12, self.buffer, True, False, skip_topk_buffer_clear=True)
                scratch = torch.full((self.tokens, TOPK), 7, dtype=torch.int32, device="cuda")  # what a layer allocates and frees
                slots, counts = self.convert(
                    self.req_id[: self.tokens],
                    self.block_table,
                    self.buffer[: self.tokens],
                    BLOCK_SIZE=BLOCK_SIZE,
                    NUM_TOPK_TOKENS=TOPK,
                    return_valid_counts=True,
                )
                del scratch
                self.slots[i].copy_(slots)
                self.counts[i].copy_(counts)


@pytest.mark.vllm
def test_kept_conversions_in_graphs_of_one_pool() -> None:
    """Two batch sizes of the target and the draft's pass, captured and replayed by turns: each layer attends to what stock would."""
    pytest.importorskip("vllm")
    target, draft = (torch.full((64, TOPK), -1, dtype=torch.int32, device="cuda") for _ in range(2))
    shapes = [(16, target), (4, target), (16, draft)]
    ours = [Pass(n, buffer, on=True) for n, buffer in shapes]
    for each in ours:
        each.fill(0)
    pool = torch.cuda.graph_pool_handle()
    graphs = [captured(each, pool) for each in ours]
    assert [each.conversions for each in ours] == [2 * len(WITH_INDEXER)] * 3  # warm-up and capture
    for seed, which in enumerate([0, 1, 2, 0, 2, 1, 0]):
        each = ours[which]
        each.fill(seed + 1)
        each.slots.fill_(7)
        graphs[which].replay()
        stock = Pass(each.tokens, torch.full_like(target, -1), on=False)
        stock.fill(seed + 1)
        stock()
        assert stock.conversions == LAYERS
        assert torch.equal(each.slots, stock.slots) and torch.equal(each.counts, stock.counts)
    assert [each.conversions for each in ours] == [2 * len(WITH_INDEXER)] * 3  # a replay runs no Python
