"""A cluster with adapters, real processes: texts equal to those of merged weights, loading and unloading while
requests run, sessions that remember theirs, workers that die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cluster.harness import Cluster
from router.model_folders import VOCAB_SIZE, write_tokenizer
from tokenizers import Tokenizer
from worker.checkpoints import make_checkpoint, transformers_model
from worker.peft_folders import PeftFolder

pytestmark = [pytest.mark.processes, pytest.mark.area("adapters")]

PROMPT = [7 + 3 * index % 90 for index in range(70)]
TOKENS = 12


class Adapted:
    """A group of two ranks with one adapter from the start; two more folders, and what each one's text is."""

    def __init__(self, root: Path) -> None:
        self.base = make_checkpoint(root / "base", vocab_size=VOCAB_SIZE)
        write_tokenizer(self.base, "what does the function do and why")
        self.folders = {name: PeftFolder(root / name, self.base, seed=seed) for seed, name in enumerate("abc")}
        self._tokenizer = Tokenizer.from_file(str(self.base / "tokenizer.json"))
        models = {"base": self.base}
        models |= {name: each.merged(root / f"{name}-merged") for name, each in self.folders.items()}
        self.texts = {name: self._expected(folder) for name, folder in models.items()}
        options = ("--tp", "2", "--dtype", "float32", "--lora-updates", "--max-lora-rank", "8")
        named = ("--served-model-name", "base", "--chunk-size", "16", "--lora", f"a={root / 'a'}")
        self.cluster = Cluster(*options, *named, model=str(self.base))

    def _expected(self, folder: Path) -> str:
        ids, model = list(PROMPT), transformers_model(folder)
        with torch.inference_mode():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        text: str = self._tokenizer.decode(ids[len(PROMPT) :], skip_special_tokens=False)
        return text

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        """A greedy completion of the prompt."""
        wanted = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        body = {"model": model, "prompt": PROMPT, **wanted, **fields}
        return httpx.post(f"{self.cluster.url}/v1/completions", json=body, timeout=60.0)

    @contextmanager
    def stream(self, model: str, tokens: int) -> Iterator[Iterator[str]]:
        """The pieces of a longer text, which must end because it is long enough."""
        wanted = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        body = {"model": model, "prompt": PROMPT, "stream": True, **wanted}

        def pieces(answer: httpx.Response) -> Iterator[str]:
            reason = ""
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    reason = choice["finish_reason"] or reason
                    yield choice["text"]
            assert reason == "length"

        with httpx.stream("POST", f"{self.cluster.url}/v1/completions", json=body, timeout=90.0) as answer:
            assert answer.status_code == 200
            yield pieces(answer)

    def text(self, model: str) -> tuple[str, int]:
        """The text, and the number of prompt tokens that were found in the cache."""
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["model"] == model
        return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    def call(self, path: str, **body: str) -> httpx.Response:
        """An admin's call."""
        url = f"{self.cluster.url}/v1/{path}_lora_adapter"
        return httpx.post(url, json=body, headers=self.cluster.admin_headers, timeout=60.0)

    def models(self) -> dict[str, Any]:
        """`/v1/models`: the parents by name."""
        listed = httpx.get(f"{self.cluster.url}/v1/models", timeout=60.0).json()["data"]
        return {card["id"]: card["parent"] for card in listed}


@pytest.fixture(scope="module")
def adapted() -> Iterator[Adapted]:
    root = Path(tempfile.mkdtemp(prefix="tl-lora-"))
    found = Adapted(root)
    try:
        with found.cluster:
            yield found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_an_adapter_is_chosen_by_model(adapted: Adapted) -> None:
    assert adapted.models() == {"base": None, "a": "base"}
    for name in ("a", "base"):
        assert adapted.text(name) == (adapted.texts[name], 0)  # nothing of another's KV is found
    for name in ("base", "a"):
        text, cached = adapted.text(name)
        assert text == adapted.texts[name]
        assert cached >= 64
    assert len(set(adapted.texts.values())) == 4
    missing = adapted.ask("nobody")
    assert missing.status_code == 404
    assert "served: base, a" in missing.json()["error"]["message"]
    card = httpx.get(f"{adapted.cluster.url}/v1/models/a", timeout=60.0).json()
    assert (card["id"], card["parent"]) == ("a", "base")
    chat = {"model": "a", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    texts = set()
    for model in ("a", "base"):
        answer = adapted.cluster.post("/v1/chat/completions", {**chat, "model": model})
        texts.add(answer["choices"][0]["message"]["content"])
        assert answer["model"] == model
    assert len(texts) == 2


def test_loaded_and_unloaded_while_requests_run(adapted: Adapted, tmp_path: Path) -> None:
    assert adapted.ask("b").status_code == 404
    going: dict[str, str] = {}
    others = [threading.Thread(target=lambda: going.update(a=adapted.text("a")[0])) for _ in range(2)]
    for thread in others:
        thread.start()
    loaded = adapted.call("load", lora_name="b", lora_path=str(adapted.folders["b"].folder))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'b' added successfully.")
    assert adapted.models() == {"base": None, "a": "base", "b": "base"}
    assert adapted.text("b")[0] == adapted.texts["b"]
    for thread in others:
        thread.join()
    assert going["a"] == adapted.texts["a"]
    for body, message in (
        ({"lora_name": "b", "lora_path": str(adapted.folders["b"].folder)}, "has already been loaded"),
        ({"lora_name": "b", "lora_path": str(adapted.folders["c"].folder)}, "unload it first"),
        ({"lora_name": "base", "lora_path": str(adapted.folders["c"].folder)}, "is the name of a model"),
        ({"lora_name": "d", "lora_path": str(tmp_path / "none")}, "there is no such folder"),
        ({"lora_name": "d", "lora_path": str(adapted.base)}, "there is no adapter_config.json"),
        ({"lora_name": "", "lora_path": "/"}, "lora_name"),
    ):
        refused = adapted.call("load", **body)
        assert refused.status_code == 400, refused.text
        assert message in refused.json()["error"]["message"]
    large = PeftFolder(tmp_path / "large", adapted.base, ("q_proj",), r=9)
    refused = adapted.call("load", lora_name="d", lora_path=str(large.folder))
    assert "rank 9; --max-lora-rank allows 8" in refused.text
    wider = PeftFolder(tmp_path / "wider", make_checkpoint(tmp_path / "another", intermediate_size=160))
    refused = adapted.call("load", lora_name="d", lora_path=str(wider.folder))
    assert refused.status_code == 400, refused.text
    assert "160" in (message := refused.json()["error"]["message"])
    assert "so the adapter is of another base model" in message
    assert set(adapted.models()) == {"base", "a", "b"}
    # A long answer goes on to its end while its adapter goes.
    with adapted.stream("b", 300) as texts:
        text = next(texts)
        gone = adapted.call("unload", lora_name="b")
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'b' removed successfully.")
        assert adapted.ask("b").status_code == 404
        text += "".join(texts)
    assert text.startswith(adapted.texts["b"])
    assert adapted.call("unload", lora_name="b").status_code == 404
    other = adapted.call("load", lora_name="b", lora_path=str(adapted.folders["c"].folder))
    assert other.status_code == 200
    assert adapted.text("b") == (adapted.texts["c"], 0)  # the same name with other content finds nothing
    assert adapted.call("unload", lora_name="b").status_code == 200


def test_only_an_admin_may_change_them(adapted: Adapted) -> None:
    url, body = f"{adapted.cluster.url}/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"}
    assert httpx.post(url, json=body, timeout=60.0).status_code == 401


def test_a_session_remembers_its_adapter(adapted: Adapted) -> None:
    assert adapted.call("load", lora_name="b", lora_path=str(adapted.folders["b"].folder)).status_code == 200
    session = adapted.cluster.post("/v1/sessions", {"model": "b"})
    assert session["model"] == "b"
    body: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "session_id": session["id"],
    }
    first = adapted.cluster.post("/v1/completions", body)
    assert adapted.texts["b"].startswith(first["choices"][0]["text"][:4])
    again = adapted.cluster.post("/v1/completions", {**body, "prompt": [9, 10, 11]})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert adapted.cluster.post(f"/v1/sessions/{session['id']}/prefetch")["known_tokens"] >= 64
    assert adapted.call("unload", lora_name="b").status_code == 200
    url = f"{adapted.cluster.url}/v1/completions"
    refused = httpx.post(url, json={**body, "prompt": [9]}, headers=adapted.cluster.admin_headers, timeout=60.0)
    assert refused.status_code == 404
    assert "'b' does not exist here" in refused.json()["error"]["message"]
    other = adapted.cluster.post("/v1/completions", {**body, "prompt": [9], "model": "base"})
    assert other["choices"][0]["text"]


def test_new_workers_have_them_too(adapted: Adapted) -> None:
    """Also those that were loaded at run time, and also for a request that was running."""
    assert adapted.call("load", lora_name="b", lora_path=str(adapted.folders["b"].folder)).status_code == 200
    with adapted.stream("b", 200) as texts:
        text = next(texts)
        name = next(name for name in adapted.cluster.pids if name.startswith("worker"))
        os.kill(adapted.cluster.pids[name], signal.SIGKILL)
        text += "".join(texts)
    assert text.startswith(adapted.texts["b"])
    for model in ("a", "b", "base"):
        assert adapted.text(model)[0] == adapted.texts[model]
