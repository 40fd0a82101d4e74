"""Peak host memory while a folder of Hugging Face becomes a model sharded over virtual devices.

Run:     python benchmarks/import_memory.py --model_size llama3_1B --mesh 1x8x1
             makes the folder first, with random weights in bfloat16
         python benchmarks/import_memory.py --folder DIR --lora_rank 16

Virtual devices have their shards in host memory too, so what they hold is printed beside the peak.
"""

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model_size", default="llama3_1B")
parser.add_argument("--folder", type=Path, help="an own folder instead")
parser.add_argument("--mesh", default="1x8x1")
parser.add_argument("--lora_rank", type=int, default=0)
arguments = parser.parse_args()
sizes = tuple(int(size) for size in arguments.mesh.split("x"))
os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(sizes[0] * sizes[1] * sizes[2]))

import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.runtime as xr  # noqa: E402

from language.hf_config import hugging_face_config  # noqa: E402
from language.hf_files import open_weights, write_json, write_weights  # noqa: E402
from language.hf_layout import sources  # noqa: E402
from language.shapes import MODEL_SIZES, ModelShape  # noqa: E402
from language.transformer_options import TransformerConfig  # noqa: E402
from transformer_tpu import build_model, start_mesh  # noqa: E402


def make_folder(folder: Path, shape: ModelShape) -> None:
    random = torch.Generator().manual_seed(0)
    parts = ((name, source.part) for source in sources(shape).values() for name in source.names)
    tensors = ((name, (0.02 * torch.randn(size, generator=random)).bfloat16()) for name, size in parts)
    write_weights(folder, shape, torch.bfloat16, tensors)
    write_json(folder / "config.json", hugging_face_config(shape, "bfloat16"))


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:6.2f} GB"


def peak() -> int:
    """Of this process since its start, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: Path) -> None:
    config = TransformerConfig(
        device="cpu", dataset="tokens", mesh=arguments.mesh, initial_weights=str(folder), lora_rank=arguments.lora_rank
    )
    xr.use_spmd()
    mesh, why = start_mesh(config)
    weights = open_weights(folder, config.shape)
    largest = max(weights.kind(name).num_bytes for name in weights.names)
    before = peak()
    model = build_model(config, mesh, torch_xla.device(), initialised=True)
    xm.wait_device_ops()
    held = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    print(f"mesh                            {why}")
    print(f"the folder's weights            {gigabytes(sum(f.stat().st_size for f in folder.glob('*.safetensors')))}")
    print(f"largest tensor, in the file      {gigabytes(largest)}")
    print(f"the devices hold                {gigabytes(held)}")
    print(f"peak of the process             {gigabytes(peak())}, {gigabytes(before)} of it before the weights")
    print(f"beside what the devices hold    {gigabytes(peak() - before - held)}")


if __name__ == "__main__":
    if arguments.folder:
        measure(arguments.folder)
    else:
        with tempfile.TemporaryDirectory() as made:
            if not os.fork():  # the memory that making takes is no part of the peak
                make_folder(Path(made), MODEL_SIZES[arguments.model_size])
                os._exit(0)
            os.wait()
            measure(Path(made))
