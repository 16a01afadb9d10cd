"""What int8 weights cost and bring: the demo model's perplexity, the small model's decode step, and bytes.

    python benchmarks/quantisation.py [--quick] [--json PATH] [--threads N] [--gguf FILE …]
                                      [--parts perplexity,speed]

`perplexity` is that of the demo model on text it was not trained on (`heldout.txt`), in separate windows of 512
tokens as in the model's README, computed by the worker's decoder in each type with and without quantisation
(`int8`: the layers' matrices, one scale per output; embeddings and head stay as they are), and from GGUF files
(`Q8_0`, `MXFP4`, …: all matrices in blocks, rounded by gguf_blocks.py; with `--gguf` also files of the demo model
that other programs made, such as llama.cpp's quantiser), and from packed checkpoints (`awq`, `gptq`, …: the
layers' matrices, rounded by packed_checkpoint.py, without the texts by which AWQ and GPTQ choose). `kl_divergence`
is the mean over the tokens of KL(float32 || this), which shows what perplexity averages out.

`step_time` is a decode step of the small model (110 M parameters, out of the caches) at a context of 64 tokens;
`linear_time` its linear layers alone, the head's included; `weight_bytes` what these read. Plain and quantised
steps take turns. One thread is measured in CPU time, more in wall time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gguf_file import write_gguf
from packed_checkpoint import compressed, write_packed
from report import Report, argument_parser, median_seconds
from small_model import small_model
from tokenizers import Tokenizer
from torch import Tensor

from trunkline.deploy.config.models import DEMO_FOLDER, resolve
from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import Kernels, PackedLinear, Quantisation
from trunkline.kernels.plan import PrefillPlan, Segments, WritePlan, build_decode_plan
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.batch.batch import ForwardBatch, ScoredPrompt
from trunkline.worker.model.checkpoint import load_weights
from trunkline.worker.model.decoder import Decoder, make_kv_pool
from trunkline.worker.model.families import check_model
from trunkline.worker.model.model_config import ModelConfig
from trunkline.worker.model.shard import Shard
from trunkline.worker.model.weights import MlpWeights
from trunkline.worker.tensor_parallel import TensorParallel

WINDOW: Final = 512
CHUNK: Final = 64
BATCHES: Final = (1, 2, 4, 6, 7, 8, 32)
CPU: Final = torch.device("cpu")
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GGUF_KINDS: Final = ("Q8_0", "Q6_K", "Q4_K", "Q4_0", "MXFP4")
PACKED: Final[dict[str, dict[str, Any]]] = {
    "awq, 4 bits": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
    "gptq, 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False},
    "gptq, 4 bits, symmetric": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True},
    "gptq, 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False},
    "compressed-tensors, 4 bits": compressed("pack-quantized", 4, strategy="group", group_size=64),
    "compressed-tensors, 8 bits": compressed("int-quantized", 8),
}
"""`quantization_config` of each. The demo model's rows have 256 or 704 inputs: the largest usual group is 64."""
PARTS: Final = ("perplexity", "speed")
FORMS: Final[tuple[Quantisation, ...]] = ("", "int8")


def int32(values: object) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


class Model:
    """A checkpoint in one form, on one rank."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        quantisation: Quantisation,
        kernels: Kernels,
        blocks: int,
        *,
        kv_dtype: str = "auto",
        change: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    ) -> None:
        """
        Args:
            blocks: of the pool for KV.
            change: what is changed in what config.json says.
        """
        config = change(check_model(folder, 1, dtype))
        shard, kind = Shard(config, 0, 1), DTYPES[dtype]
        self.kernels = kernels
        self.weights = load_weights(folder, shard, kind, CPU, kernels, lambda *_: None, quantisation)
        pool = make_kv_pool(blocks, config.chunk_format(CHUNK, dtype, kv_dtype), CPU)
        self.decoder = Decoder(shard, self.weights, kernels, TensorParallel.alone(CPU), pool)
        self._dtype = kind

    def linear_layers(self) -> Iterator[tuple[PackedLinear, bool]]:
        """In the order of a step, and whether each is gated."""
        for layer in self.weights.layers:
            assert isinstance(layer.mlp, MlpWeights)
            assert isinstance(layer.qkv, PackedLinear)
            yield from ((layer.qkv, False), (layer.attention_out, False))
            yield from ((layer.mlp.up, True), (layer.mlp.down, False))
        yield self.weights.head, False

    @property
    def weight_bytes(self) -> int:
        return sum(layer.packed_bytes for layer, _ in self.linear_layers())

    def prompt_step(self, ids: Tensor) -> ForwardBatch:
        """The prefill of a prompt, its KV in the pool's first blocks, with the logits of all tokens."""
        count = len(ids)
        blocks = -(-count // CHUNK)
        return ForwardBatch(
            inputs=lambda: (ids.numpy().astype(np.int32), np.arange(count, dtype=np.int32)),
            num_rows=0,
            write=WritePlan(CHUNK, np.arange(count, dtype=np.int32)),
            decode=None,
            prefill=PrefillPlan(
                CHUNK,
                query_indptr=int32([0, count]),
                query_position=np.arange(count, dtype=np.int32),
                item_indptr=int32([0, blocks]),
                block=np.arange(blocks, dtype=np.int32),
                first=int32([0] * blocks),
                count=int32([min(CHUNK, count - start) for start in range(0, count, CHUNK)]),
                base=int32(range(0, count, CHUNK)),
                shift=int32([0] * blocks),
            ),
            samples=[],
            samples_changed=False,
            state_rows=None,
            scored=(ScoredPrompt(0, 1, ids.numpy().astype(np.int32), 0),),
        )

    def score(self, ids: Tensor) -> Tensor:
        """Logits `[tokens, vocabulary]` of one window."""
        logits = self.decoder.forward(self.prompt_step(ids))
        assert logits is not None
        return logits

    def decode_step(self, rows: int) -> Callable[[], object]:
        """A step of rows whose contexts fill a block each; it can be repeated."""
        zeros, each = int32([0] * rows), np.arange(rows, dtype=np.int32)
        last = int32([CHUNK - 1] * rows)
        segments = Segments(each, zeros, each, zeros, last + 1, zeros, zeros)
        self.decoder.pool.data[:rows].zero_()
        self.decoder.pool.packed[:rows].zero_()
        batch = ForwardBatch(
            inputs=lambda: (np.arange(2, 2 + rows, dtype=np.int32), last),
            num_rows=rows,
            write=WritePlan(CHUNK, each * CHUNK + last),
            decode=build_decode_plan(segments, last, int32(np.zeros((0, 4))), CHUNK),
            prefill=None,
            samples=[],
            samples_changed=False,
            state_rows=None,
            scored=(ScoredPrompt(0, 1, zeros, 0),),
        )
        return lambda: self.decoder.forward(batch)

    def linear_step(self, rows: int) -> Callable[[], object]:
        """The linear layers of such a step, one after the other."""
        layers = list(self.linear_layers())
        inputs = {layer.in_features: torch.randn(rows, layer.in_features).to(self._dtype) for layer, _ in layers}
        kernels, head = self.kernels, self.weights.head

        def step() -> None:
            for layer, is_gated in layers:
                x = inputs[layer.in_features]
                if is_gated:
                    kernels.gated_linear(x, layer)
                else:
                    kernels.linear(x, layer, torch.float32 if layer is head else None)

        return step


def heldout_windows(limit: int | None) -> list[Tensor]:
    """Rows of WINDOW + 1 tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    text = (DEMO_FOLDER / "heldout.txt").read_text("utf-8")
    stream = torch.tensor([0, *tokenizer.encode(text, add_special_tokens=False).ids, 1])
    rows = len(stream) // (WINDOW + 1)
    return list(stream[: rows * (WINDOW + 1)].view(rows, WINDOW + 1))[:limit]


class Loss(NamedTuple):
    """Sums over the scored tokens."""

    nats: float
    divergence: float
    tokens: int


def losses(models: list[Model], windows: list[Tensor]) -> list[Loss]:
    """Of each model; the first is what the others are compared with."""
    sums = np.zeros((len(models), 2))
    for window in windows:
        truth: Tensor | None = None
        for index, model in enumerate(models):
            likely = model.score(window[:-1]).double().log_softmax(dim=-1)
            truth = likely if truth is None else truth
            divergence = F.kl_div(likely, truth, reduction="sum", log_target=True)
            sums[index] += (F.nll_loss(likely, window[1:], reduction="sum").item(), divergence.item())
    tokens = len(windows) * WINDOW
    return [Loss(nats, divergence, tokens) for nats, divergence in sums.tolist()]


def gguf_folders(given: list[Path], scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield a name and a folder for the demo model in blocks of each kind, and for each given file."""
    for kind in GGUF_KINDS:
        folder = scratch / kind
        folder.mkdir()
        write_gguf(DEMO_FOLDER, folder / "model.gguf", kind, "qwen2")
        (folder / "config.json").write_text((DEMO_FOLDER / "config.json").read_text())
        yield kind, folder
    for file in given:
        yield file.stem, resolve(str(file))


def run_perplexity(kernels: Kernels, windows: list[Tensor], given: list[Path], report: Report) -> None:
    blocks = WINDOW // CHUNK
    forms = [(dtype, form) for dtype in DTYPES for form in FORMS]
    names = [(dtype, form or dtype) for dtype, form in forms]
    models = [Model(DEMO_FOLDER, dtype, form, kernels, blocks) for dtype, form in forms]
    with TemporaryDirectory() as scratch:
        packed = ((name, write_packed(DEMO_FOLDER, Path(scratch, name), own)) for name, own in PACKED.items())
        for name, folder in (*gguf_folders(given, Path(scratch)), *packed):
            names.append(("float32", name))
            models.append(Model(folder, "float32", "", kernels, blocks))
    for (dtype, form), model, loss in zip(names, models, losses(models, windows), strict=True):
        case = {"model": "demo", "dtype": dtype, "weights": form, "tokens": loss.tokens}
        report.add(case, "perplexity", math.exp(loss.nats / loss.tokens), "", 1)
        report.add(case, "kl_divergence", 1e6 * loss.divergence / loss.tokens, "1e-6 nats", 1)
        report.add(case, "weight_bytes", model.weight_bytes / 1e6, "MB", 1)


def run_speed(kernels: Kernels, threads: int, quick: bool, report: Report) -> None:
    folder, budget_s = small_model(), 1.0 if quick else 6.0
    for dtype in ("bfloat16",) if quick else DTYPES:
        models = [Model(folder, dtype, form, kernels, max(BATCHES)) for form in FORMS]
        for rows in (1, 8) if quick else BATCHES:
            for metric, calls in (
                ("step_time", [model.decode_step(rows) for model in models]),
                ("linear_time", [model.linear_step(rows) for model in models]),
            ):
                seconds, runs = median_seconds(calls, threads, budget_s)
                for form, taken, model in zip(FORMS, seconds, models, strict=True):
                    case = {"model": "small", "dtype": dtype, "weights": form or dtype, "threads": threads}
                    report.add({**case, "rows": rows}, metric, taken * 1e3, "ms", runs)
                    report.add({**case, "rows": rows}, f"{metric}_gain", seconds[0] / taken, "x", runs)
                    report.add({**case, "rows": rows}, "weight_bytes", model.weight_bytes / 1e6, "MB", runs)


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files of the demo model")
    parser.add_argument("--threads", type=int, default=1, help="of the kernels")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report = Report("quantisation")
    kernels = load_kernels("cpu", "cpu", arguments.threads)
    with torch.inference_mode():
        if "perplexity" in arguments.parts:
            run_perplexity(kernels, heldout_windows(12 if arguments.quick else None), arguments.gguf, report)
        if "speed" in arguments.parts:
            run_speed(kernels, arguments.threads, arguments.quick, report)
    report.finish(arguments.json, wide=True)


if __name__ == "__main__":
    main()
