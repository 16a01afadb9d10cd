"""Whether a cluster's KV can be divided between layers with windows and others (`--window-share`)."""

from __future__ import annotations

import mmap

from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.kvstore.chunk_format import ChunkFormat
from trunkline.kvstore.window_share import blocks_within, given_back_bytes, whole_blocks
from trunkline.kvstore.windows import window_blocks
from trunkline.worker.model.model_config import ModelConfig


def check_windows(settings: ServeSettings, model: ModelConfig, part: ChunkFormat, device: str) -> None:
    """Check that a share was asked for that the model, the device and the tiers allow, and that a request can run.

    Args:
        part: what a chunk is on one rank.

    Raises:
        UserError: it cannot work. The text says what was given, what is allowed and what to do.
    """
    share = settings.window_share
    if share == 1:
        return
    given = f"--window-share is {share:g}"
    if not model.part_window:
        raise UserError(
            f"{given}, but {settings.model} is no model in which some layers have a window and others see all "
            "tokens; leave the option out"
        )
    if device != "cpu":
        raise UserError(f"{given}, but memory behind windows is given back on CPUs only; leave the option out")
    if not settings.prefix_cache:
        raise UserError(f"{given}; it works with the prefix cache only; leave one of the two options out")
    windowed = [own.window > 0 for own in model.attention[: model.kv_layers]]
    if not given_back_bytes(part, windowed, mmap.PAGESIZE):
        raise UserError(
            f"{given}, but a worker's part of a layer is {part.layer_bytes} bytes in a chunk of {part.chunk_size} "
            "tokens, too little for whole pages of memory to be given back; give a larger --chunk-size, or leave "
            "the option out"
        )
    blocks = blocks_within(settings.kv_memory_per_worker(device), part, windowed, share, mmap.PAGESIZE)
    least = window_blocks(model.part_window, settings.token_budget, settings.chunk_size) + 1
    if whole_blocks(blocks, share) < least:
        raise UserError(
            f"{given}: {whole_blocks(blocks, share)} of {blocks} blocks could hold KV of layers with a window at "
            f"once, but a window of {model.part_window} tokens and a step of {settings.token_budget} need "
            f"{least}; give more --kv-memory, a larger --window-share or a smaller --token-budget"
        )
