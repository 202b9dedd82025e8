"""A training loop in the style of Accelerate around a model that autopar has spread over the ranks.

    torchrun --nproc-per-node 4 examples/accelerate_loop.py --steps 20

Accelerate looks after devices, optimiser and scheduler, printing and trackers. The model and its batches are not
passed to ``prepare``, which would wrap and divide them again: the plan has done so.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from corpus import BYTES, SourceCode
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--seq", type=int, default=64)
    for degree in ("pp", "dp", "tp", "zero"):
        parser.add_argument(f"--{degree}", type=int, help="left to the search if not given")
    arguments = parser.parse_args()

    # The scheduler counts steps of the whole job, not those of each process.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    tokens = torch.zeros(arguments.batch, arguments.seq, dtype=torch.long)
    degrees = {name: getattr(arguments, name) for name in ("pp", "dp", "tp", "zero")}
    model = autopar.parallelize(
        LlamaForCausalLM(config),
        accelerator.num_processes,
        example_inputs={"input_ids": tokens, "labels": tokens},
        **{name: degree for name, degree in degrees.items() if degree is not None},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    loader = model.dataloader(SourceCode(arguments.seq, num_rows=256), arguments.batch, seed=1)

    step = 0
    while step < arguments.steps:
        for batch in loader:
            loss = model.step(**batch)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step:3d}  loss {float(loss):.6f}", flush=True)
            if step == arguments.steps:
                break
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
