"""One rank of `test_modules`: texts and prompts over them; rank 0 stores what the models said.

Usage: module_rank.py RANK TP FOLDER CHECKPOINT...
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
from worker.cuts import load, make_driver
from worker.module_driver import ModulePrompt, Modules
from worker.module_prompts import chain_prompt, chain_texts, random_prompt, random_texts


def main() -> None:
    rank, tp, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for checkpoint in map(Path, sys.argv[4:]):
        runner = load(checkpoint, rank=rank, tp=tp, rendezvous=f"file://{folder}/{checkpoint.name}-rendezvous")
        driver, rng = make_driver(runner), np.random.default_rng(4)
        modules, chain = Modules(driver, random_texts(rng, 7)), Modules(driver, chain_texts(rng))
        encoded = [{index: part.encode(index) for index in range(len(part.texts))} for part in (modules, chain)]
        prompts = [random_prompt(rng, modules.texts) for _ in range(3)]
        prompts += [ModulePrompt(prompt.parts[::-1], prompt.runs) for prompt in prompts]
        modules.run(prompts, 6)
        plain = chain_prompt(rng, chain.texts)
        chain.run([plain], 6)
        runner.close()
        if rank == 0:
            said = (modules.texts, chain.texts, encoded, prompts, plain)
            (folder / f"{checkpoint.name}.pickle").write_bytes(pickle.dumps(said))


if __name__ == "__main__":
    main()
