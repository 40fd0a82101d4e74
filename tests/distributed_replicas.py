"""Run the DDP step of ddp_mnist_tpu.py on N replicas without N devices; test_distributed.py starts this.

XLA's CPU client cannot run a program that torch_xla replicated: each replica compiles a module of its own, and the
client pairs collectives by module. So: trace FOLDER N ... the program, for real, at world size N, then: run FOLDER, in
a process of its own, executes that one program on N CPU replicas through jax's client.

    python tests/distributed_replicas.py trace FOLDER NUM_REPLICAS NUM_STEPS MODEL [options of ddp_mnist_tpu.py]
    python tests/distributed_replicas.py run FOLDER

MODEL: a class of ddp_mnist_tpu.py or small_models.py, or a copy of the script, mine.py, with arrays in --data_dir.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def dataset_of(name: str, config):
    from images.array_files import load_arrays
    from images.mnist import load_dataset

    return load_arrays("mine", config.data_dir) if name.endswith(".py") else load_dataset(config)


def trace(folder: Path, num_replicas: int, num_steps: int, name: str, options: list[str]) -> None:
    """Writes program.hlo (serialized), program.txt, inputs.npz and state.json: which outputs replace which inputs."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_replicas)}
    import small_models
    import torch
    import torch.distributed as dist
    import torch_xla
    from torch_xla._internal import pjrt

    import ddp_mnist_tpu as script
    from config import DdpMnistConfig
    from images.arrays import TrainBatches
    from tpu_compiler.compile.tracing import alias_id
    from tpu_utils.device import init_process_group, send
    from tpu_utils.options.parsing import parse_command_line
    from tpu_utils.record.metrics import DeviceMetrics
    from tpu_utils.step.optim import learning_rates, make_optimizer

    config = parse_command_line(DdpMnistConfig, "", options)
    dataset = dataset_of(name, config)
    pjrt.initialize_multiprocess(0, 1)  # what torch_xla.launch does first: this process is replica 0 of num_replicas
    init_process_group(tracing=True)
    assert dist.get_world_size() == num_replicas
    device = torch_xla.device()
    torch.manual_seed(config.seed)
    if name.endswith(".py"):
        found = importlib.util.spec_from_file_location("mine", name)
        script = importlib.util.module_from_spec(found)
        found.loader.exec_module(script)
        model = script.build_model(config, dataset).to(device)
    else:
        kind = getattr(script if name == "ConvNet" else small_models, name)
        model = kind(dataset.image_size, config.channels, config.hidden_dim).to(device)
    groups = getattr(script, "optimizer_of", lambda config, model: make_optimizer(config, model.parameters()))
    optimizer = groups(config, model)
    rates = learning_rates(config, num_steps).to(device)
    metrics = DeviceMetrics(["loss", "gradient_norm"], num_steps, device)
    images, labels = send(TrainBatches(dataset, config, 0, num_replicas).batch(0), device, None)
    trained = script.replicate(model, tracing=True)
    # what torch_xla.compile wraps, so that nothing is executed
    step = script.train_step.__wrapped__
    step(trained, optimizer, rates, metrics, images, labels, config)
    state = [*model.parameters(), metrics.values, metrics.step, *model.buffers()]
    state += [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    program = torch_xla._XLAC._get_xla_tensors_hlo_proto(state)
    text = torch_xla._XLAC._get_xla_tensors_hlo(state)
    input_ids, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node(state)
    output_of = {alias_id(tensor): i for i, tensor in enumerate(state)}
    replicas = [module.replica for module in model.modules() if getattr(module, "replica", None) is not None]
    batch_inputs = {alias_id(tensor): "replica" for tensor in replicas} | {
        alias_id(images): "images",
        alias_id(labels): "labels",
    }
    (folder / "program.hlo").write_bytes(program)
    (folder / "program.txt").write_text(text)
    described = {
        "output_of_input": [output_of.get(i) for i in input_ids],
        "batch_of_input": [batch_inputs.get(i) for i in input_ids],
        "losses": len(list(model.parameters())),  # index of metrics.values among the outputs
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "replicas": num_replicas,
        "model": name,
        "options": options,
        "num_steps": num_steps,
    }
    np.savez(folder / "inputs.npz", *(value.cpu().numpy() for value in inputs))
    (folder / "state.json").write_text(json.dumps(described))
    os._exit(0)  # pending operations must not be executed on the way out


def run(folder: Path) -> None:
    """Writes curve.json: the losses of all steps, and how far the weights of the replicas are apart at the end."""
    import jax

    from config import DdpMnistConfig
    from images.arrays import TrainBatches
    from tpu_utils.options.parsing import parse_command_line

    described = json.loads((folder / "state.json").read_text())
    n, num_steps = described["replicas"], described["num_steps"]
    config = parse_command_line(DdpMnistConfig, "", described["options"])
    with np.load(folder / "inputs.npz", allow_pickle=False) as file:
        values = [file[f"arr_{i}"] for i in range(len(file.files))]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)
    jax.config.update("jax_enable_x64", True)  # torch_xla sends some scalars as float64
    from jax._src import compiler
    from jax._src.interpreters.mlir import make_ir_context
    from jax.extend.mlir import hlo_to_stablehlo, ir
    from jaxlib._jax import CompileOptions, DeviceAssignment, DeviceList

    devices = jax.devices("cpu")
    options = CompileOptions()
    options.num_replicas, options.num_partitions = n, 1
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = n, 1
    build.device_assignment = DeviceAssignment.create(np.array([[device.id] for device in devices]))
    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo((folder / "program.hlo").read_bytes()))
        program = compiler.backend_compile_and_load(devices[0].client, module, DeviceList(tuple(devices)), options, [])

    dataset = dataset_of(described["model"], config)
    parts = [TrainBatches(dataset, config, replica, n) for replica in range(n)]
    buffers = [[jax.device_put(value, device) for device in devices] for value in values]
    for step in range(num_steps):
        batches = [dict(zip(("images", "labels"), part.batch(step), strict=True)) for part in parts]
        batches = [batch | {"replica": np.array([i], np.int32)} for i, batch in enumerate(batches)]
        for i, name in enumerate(described["batch_of_input"]):
            if name:
                pairs = zip(batches, devices, strict=True)
                buffers[i] = [jax.device_put(batch[name], device) for batch, device in pairs]
        outputs = program.execute_sharded(buffers).disassemble_into_single_device_arrays()
        for i, output in enumerate(described["output_of_input"]):
            if output is not None:
                buffers[i] = outputs[output]
    weights = [[np.asarray(x) for x in output] for output in outputs[: described["losses"]]]
    apart = max(float(np.abs(w - copies[0]).max()) for copies in weights for w in copies)
    losses = [np.asarray(x)[:, 0].tolist() for x in outputs[described["losses"]]]
    (folder / "curve.json").write_text(json.dumps({"losses": losses, "weights_apart": apart}))


if __name__ == "__main__":
    if sys.argv[1] == "trace":
        trace(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6:])
    else:
        run(Path(sys.argv[2]))
