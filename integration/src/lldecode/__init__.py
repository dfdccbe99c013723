"""lldecode: small, separately installed and reverted optimizations of the decode path, applied to vLLM behind flags."""
