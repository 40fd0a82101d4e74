"""Peak host memory while weights go from a folder of Hugging Face into a run, onto devices, and out again.

Run:     python benchmarks/import_memory.py --model_size llama3_1B
             makes the folder first, with random weights in bfloat16
         python benchmarks/import_memory.py --model_size qwen3_30B_A3B \\
             --num_layers 4
             a mixture of experts of 6.2 GB; needs 40 GB of disk
         python benchmarks/import_memory.py --folder DIR --lora_rank 16
             an own folder, frozen weights as it has them

Each part is a process of its own. Virtual devices have their shards in host
memory too, so what they hold is printed beside the peak. Exit code 1 where a
folder that came out differs from the one that went in.
"""

import argparse
import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model_size", default="llama3_1B")
parser.add_argument("--num_layers", type=int, default=0, help="layers of the made folder; 0: as the model has")
parser.add_argument("--folder", type=Path, help="an own folder instead")
parser.add_argument("--mesh", default="1x8x1", help="mesh of virtual devices, for --initial_weights")
parser.add_argument("--lora_rank", type=int, default=0)
parser.add_argument("--onto_devices", action="store_true", help="this part alone, in this process")
arguments = parser.parse_args()
sizes = tuple(int(size) for size in arguments.mesh.split("x"))
os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(sizes[0] * sizes[1] * sizes[2]))

import torch  # noqa: E402
import torch_xla  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.runtime as xr  # noqa: E402

from language.build import build_model  # noqa: E402
from language.mesh import start_mesh  # noqa: E402
from language.options.hf_config import hugging_face_config  # noqa: E402
from language.options.llama_shape import MODEL_SIZES  # noqa: E402
from language.options.shapes import ModelShape  # noqa: E402
from language.options.transformer_options import TransformerConfig  # noqa: E402
from language.weights.hf_files import open_weights, write_json, write_weights  # noqa: E402
from language.weights.hf_layout import sources  # noqa: E402
from transformer_tpu import partition_spec  # noqa: E402


def make_folder(folder: Path, shape: ModelShape) -> None:
    random = torch.Generator().manual_seed(0)
    parts = ((name, source.part) for source in sources(shape).values() for name in source.names)
    tensors = ((name, (0.02 * torch.randn(size, generator=random)).bfloat16()) for name, size in parts)
    write_weights(folder, shape, torch.bfloat16, tensors)
    write_json(folder / "config.json", hugging_face_config(shape, "bfloat16"))


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:6.2f} GB"


def peak() -> int:
    """Peak memory of this process since its start, in bytes, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def put_onto_devices(folder: Path) -> None:
    """The part of --initial_weights: each parameter goes to its shards before the next is read."""
    config = TransformerConfig(
        device="cpu", dataset="tokens", mesh=arguments.mesh, initial_weights=str(folder), lora_rank=arguments.lora_rank
    )
    xr.use_spmd()
    mesh, why = start_mesh(config)
    before = peak()
    model = build_model(config, mesh, torch_xla.device(), partition_spec, initialised=True)
    xm.wait_device_ops()
    held = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    rest = f"{gigabytes(before)} before the weights, {gigabytes(peak() - before - held)} beside what the devices hold"
    print(f"--initial_weights {gigabytes(peak())}: {rest} ({gigabytes(held)}, {why})", flush=True)


def print_peak(what: str, *command: str) -> None:
    """Runs a command to its end, and prints the largest memory that it had."""
    pid = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL).pid
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    print(f"{what:17} {gigabytes(used.ru_maxrss * 1024)}", flush=True)


def are_equal(one: Path, other: Path, shape: ModelShape) -> bool:
    a, b = open_weights(one, shape), open_weights(other, shape)
    return all(torch.equal(a.read(name), b.read(name)) for name in a.names)


def measure(folder: Path, shape: ModelShape) -> int:
    weights = open_weights(folder, shape)
    largest = max(weights.kind(name).num_bytes for name in weights.names)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"the folder        {gigabytes(size)}, its largest parameter {gigabytes(largest)}; peaks of each process:")
    print_peak("the imports alone", "-c", "import tools.convert_hf")
    own = ["--folder", str(folder), "--mesh", arguments.mesh, "--lora_rank", str(arguments.lora_rank)]
    subprocess.run([sys.executable, __file__, "--onto_devices", *own], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as made:
        run, out = Path(made, "run"), Path(made, "out")
        print_peak("import", "-m", "tools.convert_hf", "import", str(folder), str(run))
        print_peak("export bf16", "-m", "tools.convert_hf", "export", str(run), str(out), "bf16")
        equal = are_equal(folder, out, shape)
    print(f"what came out is {'the same, bit for bit' if equal else 'NOT what went in'}")
    return 0 if equal else 1


def main() -> int:
    if arguments.onto_devices:
        put_onto_devices(arguments.folder)
        return 0
    if arguments.folder:
        return measure(arguments.folder, TransformerConfig(initial_weights=str(arguments.folder)).shape)
    shape = MODEL_SIZES[arguments.model_size]
    shape = dataclasses.replace(shape, num_layers=arguments.num_layers or shape.num_layers)
    with tempfile.TemporaryDirectory() as made:
        if not os.fork():  # a child begins with the peak of its parent, which is to stay small
            make_folder(Path(made), shape)
            os._exit(0)
        os.wait()
        return measure(Path(made), shape)


if __name__ == "__main__":
    sys.exit(main())
