"""The settings of each model, where `trunkline serve` serves several.

model: ./large                what clients get that name none
tp: 2
disk-tier: /data/kv:100GiB
models:
  small: ./small              with its own defaults for `groups`, `tp`, `max-context` and parsers,
  tiny: {model: ./tiny, groups: 2, tp: 1, kv-memory: 2GiB}          and else what the first model has
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from trunkline.deploy.config.cli_option import FIELD_DEFAULTS
from trunkline.deploy.config.option_values import DiskOption, FurtherModel, nearest
from trunkline.deploy.config.options import OF_A_MODEL, SERVE_OPTIONS
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError

_OWN: Final = ("groups", "tp", "max_context", "rope_scaling", "tool_call_parser", "reasoning_parser")
"""Fields of the first model that say nothing about another one."""
_OPTIONS: Final = {
    option.parameter.replace("_", "-"): option for option in SERVE_OPTIONS if option.field in OF_A_MODEL
}


def settings_of_models(settings: ServeSettings) -> list[ServeSettings]:
    """Return the settings of each model alone, the first one first. The size of a common disk tier is divided.

    Raises:
        UserError: A model has an option that does not exist, is not one of a model, or has an impossible value.
    """
    further = [(model, _values(model)) for model in settings.models]
    if settings.disk_tier is not None:
        sharing = 1 + sum("disk_tier" not in values for _, values in further)
        share = DiskOption(settings.disk_tier.size_bytes // sharing, settings.disk_tier.path)
        settings = replace(settings, disk_tier=share)
    first = replace(settings, models=())
    defaults = {name: FIELD_DEFAULTS[name] for name in _OWN}
    return [
        first,
        *(
            replace(first, **{**defaults, **values}, model=model.model, served_model_name=model.name)
            for model, values in further
        ),
    ]


def _values(model: FurtherModel) -> dict[str, Any]:
    """Return the values of the fields that a model has of its own."""
    found: dict[str, Any] = {}
    for name, value in model.options:
        option = _OPTIONS.get(name.replace("_", "-"))
        where = f"model {model.name!r}: {name}"
        if option is None:
            raise UserError(f"{where} is no option of a model; {nearest(name, list(_OPTIONS))}")
        try:
            option.words(value)
        except ValueError as error:
            raise UserError(f"{where} {error}") from error
        try:
            found[option.field] = value if option.parse is None else option.parse(str(value))
        except UserError as error:
            raise UserError(f"model {model.name!r}: {error}") from error
    return found
