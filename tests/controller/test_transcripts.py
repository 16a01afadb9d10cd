"""Whole stories of an engine, told as text: `transcripts/*.txt` (format: `transcript.py`).

python -m pytest tests/controller/test_transcripts.py --rewrite     write down what the engine says now
"""

from __future__ import annotations

from pathlib import Path

import pytest
from controller.transcript import Transcript

FOLDER = Path(__file__).parent / "transcripts"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_engine_says_what_it_said(path: Path, request: pytest.FixtureRequest) -> None:
    script = path.read_text(encoding="utf-8")
    said = Transcript().replay(script)
    if request.config.getoption("--rewrite"):
        path.write_text(said, encoding="utf-8")
        return
    assert said == script


def test_there_are_transcripts() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 10
