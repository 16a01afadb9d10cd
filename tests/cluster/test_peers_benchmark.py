"""The benchmark beside other servers (benchmarks/peers.py), in its smallest form: this server, no peers."""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from pathlib import Path

import pytest
from cluster.harness import Cluster
from peer_servers import TRUNKLINE, Server, Setting
from peer_table import Table
from peers import Lengths, Speed, mark_of
from report import argument_parser, fill
from serving import Prompts, model_name

from trunkline.deploy.config.models import DEMO_FOLDER

pytestmark = pytest.mark.processes

LENGTHS = Lengths(prompt=48, prefix=32, long_prefix=64, output=48, batches=(1, 2), long_streams=2)


def test_every_cell_is_measured(cluster: Cluster, tmp_path: Path) -> None:
    server = Server(TRUNKLINE, cluster.url, model_name(cluster.url))
    table = Table([TRUNKLINE.name])
    speed = Speed([server], LENGTHS, Setting(folder=DEMO_FOLDER, dtype="float32", scratch=tmp_path))
    asyncio.run(speed.run(Prompts(4096, 0), 1, 60.0, table))
    rows = [[cell.strip() for cell in line.split("|")] for line in table.markdown()[2:]]
    assert [row[1] for row in rows] == [
        "first token, cold",
        "first token, prefix cached",
        "batch 1",
        "batch 2",
        "2 streams, 64 tokens shared",
    ]
    assert all(float(row[2].split()[0].replace(",", "")) > 0 for row in rows)
    assert not any(rows[index][4] for index in (1, 3, 4)), "they have no limit; others, if the machine was steady"
    assert re.fullmatch(r"[\d./ ]+ GB/s read, [\d./ ]+ GFLOP/s, \d+ threads", table.rates)


def test_a_run_fills_its_place_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Head\n<!-- peers.py -->\nold\n<!-- /peers.py -->\nrest\n")
    fill(page, "peers.py", ["| a |", "|---|"])
    fill(page, "peers.py", ["| b |", "|---|", "| 1 |"])
    assert page.read_text() == "# Head\n<!-- peers.py -->\n| b |\n|---|\n| 1 |\n<!-- /peers.py -->\nrest\n"
    with pytest.raises(SystemExit, match="between <!-- other --> and <!-- /other -->, once"):
        fill(page, "other", [])
    (page := tmp_path / "twice.md").write_text("<!-- x -->\n<!-- /x -->\n" * 2)
    with pytest.raises(SystemExit, match="once"):
        fill(page, "x", [])


@pytest.mark.parametrize(
    ("name", "gguf", "before"),
    [
        ("benchmarks.md", (), ""),
        ("measurements/servers.md", ("Q8_0",), ""),
        ("measurements/servers.md", (), "trunkline"),
    ],
)
def test_pages_have_places_for_tables(name: str, gguf: tuple[str, ...], before: str, tmp_path: Path) -> None:
    mark = mark_of(Namespace(gguf=gguf, before=before))
    page = tmp_path / Path(name).name
    page.write_text((Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8"))
    fill(page, mark, [f"| new {mark} |"])
    assert f"\n| new {mark} |\n" in page.read_text(encoding="utf-8")


def test_parts_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argument_parser("A benchmark.", ("one", "two", "three"))
    assert parser.parse_args([]).parts == ("one", "two", "three")
    assert parser.parse_args(["--parts", "three,one"]).parts == ("one", "three"), "in the parts' own order"
    with pytest.raises(SystemExit):
        parser.parse_args(["--parts", "two,tow"])
    assert "--parts: tow unknown; there are one, two, three" in capsys.readouterr().err
