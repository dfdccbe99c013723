"""The feature: what the draft steps, the layers and the ranks of MTP speculation in vLLM 0.26.0 need not do again."""

from lldecode.feature import Context, Feature
from lldecode_mtp_spec import vllm_hooks, vllm_ranks, vllm_sharing, vllm_slots

ARCHS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities of the GPUs that vLLM 0.26.0's ``deepseek_v32`` class runs on."""


def probe(ctx: Context) -> str | None:
    """Why the feature cannot run here, or None. What a model or a configuration does not fit is declined where it is loaded."""
    return vllm_sharing.invalid_share() or vllm_ranks.invalid_local_argmax() or ctx.unproven(ARCHS)


FEATURE = Feature(
    name="mtp-spec",
    summary="MTP in the deepseek_v32 class: one top-k for all draft steps, conversion once an indexer, fused final norm, local argmax",
    patches=(*vllm_hooks.PATCHES, *vllm_sharing.PATCHES, *vllm_slots.PATCHES, *vllm_ranks.PATCHES),
    probe=probe,
    default="off",  # a step took no less wall-clock time with it
    superseded_by="vLLM 0.28.0 (#49793), the index conversion by 0.30.0",
)
