"""A model of transformers, trained by its Trainer on the ranks of a plan.

    torchrun --nproc-per-node 4 examples/hf_trainer.py --steps 20
    torchrun --nproc-per-node 4 examples/hf_trainer.py --model path/to/checkpoint --dp 2 --tp 2

Without ``--model`` it starts from a small Llama that it makes itself. The losses are those of one rank.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from corpus import BYTES, SourceCode
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar
from autopar.huggingface.trainer import ParallelTrainer
from autopar.runtime.agreement import from_first
from autopar.runtime.launch import ensure_process_group


def small_llama(folder: str) -> str:
    """Writes a checkpoint of a Llama over bytes; returns its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder of a causal language model over at least 256 tokens")
    parser.add_argument("--output", default="out/hf_trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    for degree in ("pp", "dp", "tp", "zero"):
        parser.add_argument(f"--{degree}", type=int, help="left to the search if not given")
    arguments = parser.parse_args()

    ensure_process_group()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or from_first(lambda: small_llama(folder))
        tokens = torch.zeros(arguments.batch, arguments.seq, dtype=torch.long)
        degrees = {name: getattr(arguments, name) for name in ("pp", "dp", "tp", "zero")}
        model = autopar.from_pretrained(
            path,
            dist.get_world_size(),
            example_inputs={"input_ids": tokens, "labels": tokens},
            **{name: degree for name, degree in degrees.items() if degree is not None},
        )
    settings = TrainingArguments(
        arguments.output, max_steps=arguments.steps, learning_rate=3e-3, logging_steps=1, save_steps=10, seed=1,
        report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = ParallelTrainer(model, settings, train_dataset=SourceCode(arguments.seq, num_rows=256))
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
