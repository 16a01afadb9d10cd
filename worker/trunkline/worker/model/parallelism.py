"""Whether ranks can share a model: what of it they cannot divide, in words. No torch."""

from __future__ import annotations

from trunkline.worker.errors import ParallelismError
from trunkline.worker.model.model_config import ModelConfig


def check_parallelism(config: ModelConfig, tp: int) -> None:
    """Check that `tp` ranks can share the model. The vocabulary is padded, so it may have any size.

    Raises:
        ParallelismError: A number cannot be divided; the message names it, and numbers of ranks that would do.
    """
    if tp < 1:
        raise ParallelismError(f"tp is {tp}; it must be at least 1")
    reasons = obstacles(config, tp)
    if not reasons:
        return
    allowed = [n for n in range(1, config.heads + 1) if not obstacles(config, n)]
    raise ParallelismError(
        f"cannot split {' and '.join(reasons)} over {tp} ranks; "
        f"possible for this model: {', '.join(map(str, allowed))}"
    )


def obstacles(config: ModelConfig, tp: int) -> list[str]:
    """Return what `tp` ranks cannot share, in words; the vocabulary is padded."""
    reasons = []
    if config.heads % tp:
        reasons.append(f"{config.heads} attention heads")
    if config.kv_heads % tp and tp % config.kv_heads:  # fewer KV heads than ranks: replicated
        reasons.append(f"{config.kv_heads} KV heads")
    for fewer in sorted({own.heads.kv_heads for own in config.attention if own.heads} - {config.kv_heads}):
        if fewer % tp and tp % fewer:
            reasons.append(f"{fewer} KV heads of some layers")
    mixture = config.mixture
    if mixture is not None and not mixture.is_split and mixture.experts < tp:
        reasons.append(f"{mixture.experts} experts")
    if mixture is not None and mixture.is_split and mixture.width % tp:
        reasons.append(f"experts of {mixture.width}")
    if mixture is not None and mixture.shared_width % tp:
        reasons.append(f"shared experts of {mixture.shared_width}")
    if mixture is None or mixture.dense_layers:
        widths = sorted(set(config.mlp_widths) or {config.intermediate_size})
        reasons += [f"an MLP of {width}" for width in widths if width % tp]
    return reasons
