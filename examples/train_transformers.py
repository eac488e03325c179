"""The Hugging Face Trainer with parameters and optimizer states on a drive, from a DeepSpeed
configuration full of "auto":

    OMP_NUM_THREADS=16 torchrun --nproc-per-node=2 train_transformers.py --deepspeed ds_config_auto.json --output_dir out

Every option of TrainingArguments can be given; --resume_from_checkpoint goes on from the last
checkpoint in the output directory.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import nvme_offload.zero3
from nvme_offload.zero3.transformers import TrainerProgress


class Sentences(torch.utils.data.Dataset):
    """Sentences that count upwards, from different words on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (index + torch.arange(32)) % 100
        return {"input_ids": words, "labels": words}


def main() -> None:
    """Train and save."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(use_cpu=not torch.cuda.is_available())  # or the Trainer refuses --bf16
    # first: models made after it go to the drive layer by layer
    (arguments,) = parser.parse_args_into_dataclasses()

    nvme_offload.zero3.enable()  # the one line that makes the difference

    model = AutoModelForCausalLM.from_config(
        GPT2Config(
            vocab_size=100,
            n_positions=32,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Sentences(), callbacks=[TrainerProgress()]
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
