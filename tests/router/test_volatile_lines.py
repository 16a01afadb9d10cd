"""Lines of prompts that change with every request are left out by named rules, which can be switched off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from router.api_calls import last_prompt
from router.fake_controller import FakeController
from router.harness import DEMO_MODEL, running

from trunkline.router.config import RouterConfig
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.router.text.volatile_lines import RULES, without_volatile

HEADER: Final = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
BE_BRIEF: Final = {"type": "text", "text": "Be brief."}


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def test_the_billing_header_is_left_out() -> None:
    for line in (HEADER, f"{HEADER}\n"):
        assert without_volatile([block(line), BE_BRIEF]) == ([BE_BRIEF], "billing-header")
        assert without_volatile([block(line)]) == ([], "billing-header")
        assert without_volatile([block(line), BE_BRIEF], ["billing-header"]) == ([block(line), BE_BRIEF], "")


@pytest.mark.parametrize(
    "system",
    [
        HEADER,  # a text of the user's own
        [BE_BRIEF, block(HEADER)],
        [block(f"{HEADER}\nBe brief.")],
        [block(f"Note: {HEADER}")],
        [block(f"\n{HEADER}")],
        [block(HEADER) | {"type": "document"}],
        [{"type": "text", "text": 3}],
        [],
        [3],
        None,
    ],
)
def test_nothing_else_is(system: Any) -> None:
    assert without_volatile(system) == (system, "")


def ask(http: httpx.Client, path: str, header: str) -> dict[str, Any]:
    body = {"system": [block(header), BE_BRIEF], "messages": [{"role": "user", "content": "Hi"}]}
    answer = http.post(path, json={"model": "demo", "max_tokens": 20, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_prompts_stay_the_same_when_the_header_changes(
    http: httpx.Client, fake: FakeController, tokenizer: Tokenizer
) -> None:
    answer = ask(http, "/v1/messages", HEADER)
    [warning] = answer["warnings"]
    assert "billing-header" in warning
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(same)
    ask(http, "/v1/messages", HEADER.replace("fa690", "0b1d7"))
    assert last_prompt(fake, tokenizer) == tokenizer.render_chat(same)
    counted = ask(http, "/v1/messages/count_tokens", HEADER)["input_tokens"]
    assert counted == len(tokenizer.encode(tokenizer.render_chat(same), add_special_tokens=False))


def test_a_rule_can_be_switched_off(place: Path, tokenizer: Tokenizer) -> None:
    with running(place, tokenizer, show_lines=["billing-header"]) as (router, [fake]), router.client() as http:
        assert "warnings" not in ask(http, "/v1/messages", HEADER)
        assert HEADER in last_prompt(fake, tokenizer)
    with pytest.raises(ValueError, match=r"show_lines: 'billing' is no rule; there are billing-header"):
        RouterConfig(model_path=str(DEMO_MODEL), controllers=["ipc://x"], show_lines=["billing"]).validate()


def test_the_page_about_clients_lists_the_rules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    _, _, section = page.partition("### Volatile lines")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(rule.name, rule.client, rule.what) for rule in RULES]
