"""The Hugging Face Trainer without DeepSpeed, its optimizer states on a drive:

    python hf_trainer.py --nvme_path /local_nvme --output_dir out

Every option of TrainingArguments can be given; --resume_from_checkpoint goes on bit for bit from a
checkpoint in the output directory.
"""

import dataclasses

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from nvme_offload import NVMeOptimizer
from nvme_offload.zero3.transformers import TrainerProgress


@dataclasses.dataclass
class Offload:
    """Where optimizer states go."""

    nvme_path: str = "/local_nvme"
    host_memory: str = "2MB"  # less than this model's states, so that the drive is used


class Sentences(torch.utils.data.Dataset):
    """Sentences that count upwards, from different words on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (index + torch.arange(32)) % 100
        return {"input_ids": words, "labels": words}


def main() -> None:
    """Train and save."""
    arguments, offload = HfArgumentParser(
        (TrainingArguments, Offload)
    ).parse_args_into_dataclasses()
    torch.manual_seed(0)
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
    # The Trainer makes the optimizer, with its own groups for weight decay and its own schedule.
    states_on_drive = {
        "paths": offload.nvme_path,
        "host_memory": offload.host_memory,
        "lr": arguments.learning_rate,
    }
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Sentences(),
        optimizer_cls_and_kwargs=(NVMeOptimizer, states_on_drive),
    )
    TrainerProgress.put_first(trainer)
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
