"""A GGUF file as MODEL: the folder that stands for it, its name, its digest, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_file import STRING as TEXT
from worker.gguf_files import METADATA, TENSORS, file_of

from trunkline.deploy.config import models
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.config.stretched import folder_of as stretched_folder
from trunkline.deploy.errors import UserError
from trunkline.deploy.supervisor.serve import plan_cluster
from trunkline.router.text.tokenizer import Tokenizer
from trunkline.worker.model.families import check_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    path.write_bytes(file_of({**METADATA, "tokenizer.chat_template": (TEXT, TEMPLATE)}, TENSORS))
    return path


def test_a_file_is_a_model(file: Path, cache: Path) -> None:
    folder = models.resolve(str(file))
    assert folder.is_relative_to(cache)
    assert models.resolve(str(file)) == folder
    assert models.resolve(str(file.parent)) == folder, "a folder with one model is that model"
    assert models.default_name(str(file)) == "tiny-Q8_0"
    assert check_model(folder, 1, "float32").vocab_size == 9
    assert models.resolve_dtype(folder, "auto", "cpu") == "float32"
    assert models.resolve_dtype(folder, "auto", "cuda") == "bfloat16"
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("ab", add_special_tokens=True) == [1, 8]
    assert tokenizer.eos_ids == {2}
    assert tokenizer.has_chat_template
    tokenizer.close()


def test_another_file_is_another_model(file: Path) -> None:
    folder, digest = models.resolve(str(file)), models.weights_digest(models.resolve(str(file)))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1  # a weight
    file.with_name("new").write_bytes(data)
    file.with_name("new").rename(file)
    assert models.resolve(str(file)) != folder
    assert models.weights_digest(models.resolve(str(file))) != digest
    file.with_name("second.gguf").write_bytes(data)
    with pytest.raises(
        UserError, match=r"several GGUF models; give one of the files: second\.gguf, tiny-Q8_0\.gguf"
    ):
        models.resolve(str(file.parent))


def test_a_stretched_file(file: Path) -> None:
    settings = ServeSettings(model=str(file), rope_scaling="yarn", max_context=256)
    folder = stretched_folder(settings)
    assert folder != models.resolve(str(file))
    assert check_model(folder, 1, "float32").max_positions == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": (TEXT, "t5")}, r"tiny-Q8_0\.gguf: tokenizer\.ggml\.model is 't5'"),
        ({"general.architecture": (TEXT, "rwkv7")}, "unsupported architecture: 'rwkv7'; of GGUF files are read"),
        ({"tokenizer.huggingface.json": (TEXT, "{}")}, "has a tokenizer that cannot be built"),
    ],
)
def test_what_is_refused_before_a_start(changes: dict[str, tuple[int, object]], message: str, file: Path) -> None:
    file.write_bytes(file_of({**METADATA, **changes}, TENSORS))
    with pytest.raises(UserError, match=message):
        plan_cluster(ServeSettings(model=str(file), port=0))
    file.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="4 bytes, too few"):
        plan_cluster(ServeSettings(model=str(file), port=0))


def test_parts_are_one_model(file: Path) -> None:
    part = file.with_name("large-00002-of-00002.gguf")
    file.rename(part)
    assert models.default_name(str(part)) == "large"
    with pytest.raises(UserError, match=r"1 of its 2 parts are missing: large-00001-of-00002\.gguf"):
        models.resolve(str(part))


def test_8_bits_of_8_bits_are_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"--quantization is int8, but .*tiny-Q8_0\.gguf has quantised weights"):
        plan_cluster(ServeSettings(model=str(file), port=0, quantization="int8", tp=1))
