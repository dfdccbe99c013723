"""The optimized sparse-attention model class of vLLM 0.26.0 for GLM-5.2 and DeepSeek-V3.2, without a flag for each part."""
