"""ZeRO-Inference: a pretrained model whose parameters stay on a drive and stream through, layer by
layer, for every token.

deepspeed --num_gpus=1 zero_inference.py --model DIRECTORY --nvme_path /local_nvme --prompt 5 6 7
"""

import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import nvme_offload.zero3


def main() -> None:
    """Generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", metavar="DIRECTORY", required=True, help="as save_pretrained writes one"
    )
    parser.add_argument(
        "--nvme_path", metavar="DIRECTORY", default="/local_nvme", help="a directory on the drive"
    )
    parser.add_argument(
        "--host_memory", default="auto", help='of parameters at a time, such as "8GB"'
    )
    parser.add_argument(
        "--prompt", type=int, nargs="+", required=True, help="the numbers of the first words"
    )
    parser.add_argument("--words", type=int, default=8, help="how many to generate")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    arguments = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed asks for it
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": arguments.nvme_path},
        },
        "nvme_offload": {"host_memory": arguments.host_memory},
    }

    nvme_offload.zero3.enable()  # the one line that makes the difference

    deepspeed.init_distributed()
    # from_pretrained looks for it, so it must live until then
    on_the_drive = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    prompt = torch.tensor([arguments.prompt], device=engine.device)
    words = engine.module.generate(
        prompt, max_new_tokens=arguments.words, do_sample=False, synced_gpus=engine.world_size > 1
    )
    if engine.global_rank == 0:
        print(*words[0].tolist())
        print(nvme_offload.zero3.stats(engine), flush=True)  # of the last word
    del on_the_drive
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
