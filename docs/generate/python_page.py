"""The Python reference: the client's package whole, and of the engine the parts that decide."""

from __future__ import annotations

from typing import Final

_SECTIONS: Final = (
    (
        "Prompt programs and the client",
        "For use in your own programs; stable within a minor version.",
        ("trunkline.prompts",),
    ),
    (
        "Messages",
        "What processes say to each other, each beside the one that receives it ([protocol](../protocol.md)).",
        (
            "trunkline.router.messages",
            "trunkline.controller.messages",
            "trunkline.controller.reports",
            "trunkline.worker.messages",
        ),
    ),
    (
        "The controller's engine",
        "Pure: no sockets, clocks or threads ([architecture](../architecture.md)).",
        (
            "trunkline.controller.engine.engine",
            "trunkline.controller.scheduling.scheduler",
            "trunkline.controller.cache.radix_tree",
            "trunkline.controller.cache.radix_cache",
            "trunkline.controller.allocation.kv_manager",
            "trunkline.controller.cache.block_pool",
            "trunkline.controller.sequences.plan_builder",
        ),
    ),
    (
        "Tiers",
        "The directory of what is where, and the rules by which it moves.",
        ("trunkline.kvstore.directory", "trunkline.kvstore.chunks", "trunkline.kvstore.tier_policy"),
    ),
    (
        "Routing",
        "Who serves a request ([routing](../routing.md)).",
        (
            "trunkline.router.routing.core",
            "trunkline.router.routing.index",
            "trunkline.router.routing.policies",
            "trunkline.router.routing.request",
        ),
    ),
    (
        "Kernels",
        "The operations on paged KV ([kernels](../kernels.md)).",
        ("trunkline.kernels.ops", "trunkline.kernels.plan"),
    ),
    (
        "Supervision",
        "Who is started, stopped and started again.",
        ("trunkline.deploy.supervisor.lifecycle", "trunkline.deploy.supervisor.units"),
    ),
)


def page() -> str:
    """Markdown with directives of mkdocstrings."""
    parts = [
        "# Python",
        "Made from docstrings. Everything not listed here is internal, and so is most of what is.",
    ]
    for title, text, modules in _SECTIONS:
        parts += [
            f"## {title}",
            text,
            *(f"::: {module}\n    options:\n      heading_level: 3" for module in modules),
        ]
    return "\n\n".join(parts) + "\n"
