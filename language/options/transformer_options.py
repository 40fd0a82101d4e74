"""Options and presets of transformer_tpu.py, which `python config.py` prints too. Imports no torch."""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from language.options.shapes import BYTE_VOCAB_SIZE, GPT_SIZES, LLAMA_SIZES, ModelShape
from tpu_utils.base.errors import InputError
from tpu_utils.options.fields import FREE, NoEffect, Range, Seldom
from tpu_utils.options.train_config import ON_TPU, HostOptions, TrainConfig

Dataset = Literal["synthetic", "text", "tokens", "chat", "stream"]
ChatFormat = Literal["auto", "plain", "chatml", "qwen3", "llama3", "gemma", "mistral", "phi4", "olmo2"]
# a source of your own: its name in Dataset, its vocabulary here
SMALLEST_VOCAB_SIZE = {"synthetic": 4, "text": BYTE_VOCAB_SIZE}  # others: 1
DEFAULT_VOCAB_SIZE = {"synthetic": 64, "text": BYTE_VOCAB_SIZE, "chat": BYTE_VOCAB_SIZE}  # others: of the model's size
ONLY = {own: NoEffect("dataset", *(n for n in get_args(Dataset) if n != own)) for own in get_args(Dataset)}
NO_EXPERTS = NoEffect("num_experts", 0)
WITH_REMAT = NoEffect("remat", False)
Kept = Literal["inputs", "attention", "projections", "residual", "products"]

FINEWEB_10B = ON_TPU | dict(optimization_level="aggressive", dataset="tokens", global_batch_size=512, num_steps=18865)
FINEWEB_10B |= dict(train_data="fineweb_train_*.bin", validation_data="fineweb_val_*.bin")
FINEWEB_10B |= dict(warmup_steps=700, eval_every=250)
CHATS = dict(run_dir="runs/finetune", dataset="chat", train_data="chats.jsonl", sequence_length=1024, keep_best=True)
CHATS |= dict(num_steps=1000, learning_rate=1e-5, warmup_steps=50)
ONE_CHIP = ON_TPU | dict(optimization_level="aggressive", attention="flash", remat=True, scan_layers=True)
OF_8B = dict(scan_layers=False, remat_keep="attention", sequence_length=8192, global_batch_size=8)
OF_8B |= dict(compiler_options="xla_tpu_scoped_vmem_limit_kib=98304", run_dir="runs/finetune_8B")


@dataclass(frozen=True)
class TransformerConfig(HostOptions, TrainConfig):
    """What transformer_tpu.py trains, and on which mesh."""

    dataset: Dataset = "synthetic"
    """synthetic: a Markov chain of known entropy. text: UTF-8 bytes. tokens: llm.c shards. chat: conversations in JSON
    lines, with loss on the answers alone. stream: documents in parquet or JSON lines, tokenized as the run goes."""
    train_data: Annotated[str, NoEffect("dataset", "synthetic")] = ""
    """text, chat: a file or folder. tokens: shards, for example 'fineweb_train_*.bin'. stream: a folder, a pattern, gs://
    or a .txt with one of these a line. Relative to data_dir."""
    validation_data: Annotated[str, NoEffect("dataset", "synthetic")] = ""
    """Like train_data. Empty: the last tenth of train_data (text, chat), or every tenth of the first 1,000 documents of
    a file (stream)."""
    tokenizer: Annotated[str, FREE, NoEffect("dataset", "synthetic", "text")] = ""
    """tokenizer.json or its folder. Empty: that of initial_weights; without these bytes (chat, stream), or that of the
    shards (tokens), which samples and exports need."""
    chat_format: Annotated[ChatFormat, ONLY["chat"]] = "auto"
    """chat: how a conversation becomes text. auto: by the special tokens that the tokenizer has, else plain."""
    document_separator: Annotated[str, ONLY["text"]] = ""
    """text: what divides documents inside a file, for example a blank line. Empty: a file is one document."""
    text_field: Annotated[str, ONLY["stream"]] = "text"
    """stream: the column, or the key of a line, that holds the text of a document. 16 MiB at most."""
    stream_lanes: Annotated[int, Range("[0, 4096]"), ONLY["stream"]] = 0
    """stream: files read at a time, over all hosts; must divide global_batch_size. 0: as many as do, up to 64,
    that have equally many files, or four or more each."""
    stream_window: Annotated[int, Range("[1, 1000000]"), ONLY["stream"]] = 512
    """stream: documents that are shuffled among themselves. Two windows of each lane are in memory."""
    stream_workers: Annotated[int, Range("[0, 4096]"), FREE, ONLY["stream"]] = 0
    """stream: threads of a host that read and tokenize. 0: one for each core, at most 16."""
    stream_damaged: Annotated[Literal["refuse", "skip"], FREE, ONLY["stream"]] = "refuse"
    """stream: documents and files that cannot be read. skip: leave them out, and say how many."""
    bucketed: Annotated[bool, ONLY["text"]] = False
    """text: pad short documents to the next multiple of 128 only; one graph for each length that occurs."""
    tasks: Annotated[tuple[str, ...], FREE, NoEffect("dataset", "synthetic")] = ()
    """NAME=PATH, scored at every evaluation: a task of lm_eval (requirements-evaluate.txt) or its YAML file, or core,
    and the file or folder with its questions; hellaswag may be llm.c's file."""
    task_questions: Annotated[int, Range("[0, inf)"), FREE, NoEffect("tasks", ())] = 0
    """Score only the first N questions of each task; 0 scores all."""
    model_size: Annotated[Literal[(*GPT_SIZES, *LLAMA_SIZES)], NoEffect("model_config")] = "tiny"
    """Layers, heads, width and context of a published model; each can be set by itself. Vocabulary: vocab_size."""
    initial_weights: Annotated[str, FREE] = ""
    """Hugging Face folder, config.json and safetensors, whose weights training starts from. Models: families.py."""
    model_config: Annotated[str, Seldom()] = ""
    """A config.json of Hugging Face, in place of model_size. The run keeps its text. Empty: that of initial_weights."""
    lora_rank: Annotated[int, Range("[0, 4096]")] = 0
    """Freeze the weights and train adapters of this rank. 0: train all weights."""
    lora_alpha: Annotated[float, Range("(0, inf)"), NoEffect("lora_rank", 0)] = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_base: Annotated[Literal["auto", "float32", "bfloat16"], FREE, NoEffect("lora_rank", 0)] = "auto"
    """Type of LoRA's frozen weights. auto: bfloat16 where config.json says so, else float32, so none is rounded."""
    initialise_new_tokens: Annotated[Literal["as_they_are", "mean"], FREE, ONLY["chat"]] = "as_they_are"
    """chat: rows of the format's tokens that initial_weights left untrained. mean: start at the mean of the others."""
    num_layers: Annotated[int, Range("[0, inf)")] = 0
    """Number of layers. 0: that of model_size, as in the next three."""
    num_heads: Annotated[int, Range("[0, inf)")] = 0
    """Number of attention heads."""
    embedding_dim: Annotated[int, Range("[0, inf)")] = 0
    """Width of the model."""
    sequence_length: Annotated[int, Range("[0, inf)")] = 0
    """Context: the longest sequence, in tokens. 0 with model_config: what that says, at most 4096."""
    vocab_size: Annotated[int, Range("[0, 1048576]"), Seldom("num_layers", "num_heads", "embedding_dim")] = 0
    """Vocabulary size. 0: 64 (synthetic), 257 (bytes: text, chat), else that of model_size or model_config."""
    num_steps: Annotated[int, Range("[1, 10000000]")] = 500
    """Optimizer steps of the run."""
    gradient_accumulation_steps: Annotated[int, Range("[1, inf)")] = 1
    """Micro-batches of a global batch, computed one after another in one graph."""
    clip_gradient_norm: Annotated[float, Range("[0, inf)")] = 1.0
    """Largest global norm of the gradient. 0: no clipping."""
    dropout: Annotated[float, Range("[0, 1)")] = 0.0
    """Dropout of embeddings and of what attention and MLP add, in training only. Attention weights are not dropped."""
    expert_capacity: Annotated[float, Range("[0, 64]"), NO_EXPERTS] = 0.0
    """Most tokens of a sequence that an expert takes, in even shares, such as 1.25; others are dropped. 0: no limit."""
    balance_loss: Annotated[float, Range("[0, inf)"), NO_EXPERTS] = 0.01
    """Weight of the loss that keeps a router from favouring a few experts."""
    router_z_loss: Annotated[float, Range("[0, inf)"), NO_EXPERTS] = 0.0
    """Weight of the router z-loss: the mean square of the log-sum-exp of a router's logits."""
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "adamw"
    """Optimizer. muon updates the matrices of the layers, and the rest as adamw does, at the same rate."""
    momentum: Annotated[float, Range("[0, 1)"), NoEffect("optimizer", "adam", "adamw", "muon")] = 0.9
    """Momentum of SGD."""
    muon_momentum: Annotated[float, Range("[0, 1)"), NoEffect("optimizer", "sgd", "adam", "adamw")] = 0.95
    """Momentum of Muon."""
    adam_beta2: Annotated[float, Range("[0, 1)"), NoEffect("optimizer", "sgd")] = 0.95
    """Decay rate of the mean of the squared gradients in Adam and AdamW."""
    weight_decay: Annotated[float, Range("[0, inf)")] = 0.1
    """Weight decay of matrices; layer norms and biases never decay."""
    mesh: Annotated[str, FREE] = "auto"
    """DATAxFSDPxTENSORxCONTEXTxEXPERT, as many devices as their product. 2x4x1: the last two are 1."""
    print_placement: Annotated[bool, FREE, Seldom("mesh")] = False
    """Print how each parameter is sharded."""
    remat: Annotated[bool, FREE] = False
    """Keep only the input of each layer for the backward pass and compute the rest again: less memory, more time."""
    remat_keep: Annotated[Kept, FREE, WITH_REMAT] = "inputs"
    """What remat keeps of a layer instead of computing it again, each value with those before it: the input; the output
    of attention; q, k and v; the sum that the MLP reads; the first products of the MLP."""
    remat_all_but: Annotated[int, FREE, Range("[0, inf)"), WITH_REMAT] = 0
    """How many layers, the last ones, keep what remat_keep=products keeps: none of their products is computed again."""
    offload: Annotated[Literal["nothing", Kept], FREE, WITH_REMAT] = "nothing"
    """Last of the kept values that lies in host memory between the two passes. TPU only, else without effect."""
    scan_layers: Annotated[bool, FREE, Seldom("remat")] = False
    """Compile one layer and loop over it: smaller graph, slower step. With remat it is faster than without."""
    loss_parts: Annotated[int, FREE, Range("[1, 1024]"), Seldom("remat")] = 1
    """Parts into which the vocabulary is divided for the loss: only one part has logits in memory. The backward pass
    makes them again: less memory, one product of the head more."""
    attention: Annotated[Literal["plain", "flash"], FREE] = "plain"
    """flash: Pallas kernels, which need a TPU, jax 0.7.1 and a sequence_length that is a multiple of 128."""
    context_attention: Annotated[Literal["auto", "gather", "ulysses"], FREE, Seldom("mesh")] = "auto"
    """On a mesh with a context axis. gather: each device has its queries, and keys and values of all positions.
    ulysses: some heads and all positions; the axis must divide the key/value heads. auto: gather."""
    eval_every: Annotated[int, Range("[1, inf)")] = 100
    """Steps between two evaluations. The last step is always evaluated."""
    eval_batches: Annotated[int, Range("[1, inf)")] = 20
    """Most batches of global_batch_size in one evaluation."""
    sample_every: Annotated[int, FREE, Range("[0, inf)")] = 0
    """Steps between two samples of the model, one after each of sample_prompts. The last step has one. 0: none."""
    sample_prompts: Annotated[tuple[str, ...], FREE, NoEffect("sample_every", 0)] = ("",)
    """Texts to continue; with dataset chat, questions to answer."""

    free_elsewhere = TrainConfig.free_elsewhere | {"hellaswag", "sharding"}  # options of older versions
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "quick_test": dict(num_steps=200, global_batch_size=32, learning_rate=2e-3, warmup_steps=20),
        # nanoGPT's CPU example: 4 layers, 4 heads, width 128, context 64, batch 12, 2,000 iterations
        "development": dict(
            dataset="text",
            train_data="tinyshakespeare.txt",
            num_layers=4,
            num_heads=4,
            global_batch_size=12,
            num_steps=2000,
            learning_rate=3e-3,
            final_learning_rate_fraction=0.1,
            adam_beta2=0.99,
            warmup_steps=100,
            log_every=50,
            save_every=500,
            eval_every=500,
            eval_batches=1000,
        ),
        # llm.c's GPT-2 124M on 10B tokens of FineWeb; for v5litepod-8
        "production": FINEWEB_10B
        | dict(
            run_dir="runs/gpt2_124M",
            model_size="124M",
            gradient_accumulation_steps=8,
            learning_rate=6e-4,
            save_every=1000,
        ),
        # the largest GPT-2, for v5litepod-16. --mesh auto: two copies of the state, each sharded over 8 chips; 1x16x1:
        # 133,000 collective-permutes a step, and work of 13.6 s instead of 5.6 between them (libtpu 0.0.21's estimate)
        "distributed": FINEWEB_10B
        | dict(
            run_dir="runs/gpt2_1558M",
            model_size="1558M",
            remat=True,
            scan_layers=True,
            gradient_accumulation_steps=4,
            learning_rate=2e-4,
            save_every=500,
        ),
        # chats for Qwen3 0.6B, which --initial_weights names, on v5litepod-1: docs/fine_tuning.md
        "finetune": ONE_CHIP | CHATS | dict(global_batch_size=8),
        # Qwen3 8B or Llama 3 8B on v6e-8: docs/search.md
        "finetune_8B": ONE_CHIP | CHATS | OF_8B,
    }

    def __post_init__(self):
        for option, path in (("model_config", self.model_config), ("initial_weights", self.initial_weights)):
            if path and not self.model_config.startswith("{"):  # in a run it is the text
                path = Path(path) if option == "model_config" else Path(path, "config.json")
                from language.options.model_config import read_model_config  # only for a model of Hugging Face

                object.__setattr__(self, "model_config", read_model_config(option, path))
        super().__post_init__()

    def problems(self) -> list[str]:
        return super().problems() or check_transformer(self)

    @classmethod
    def carry_over(cls, found: dict[str, Any]) -> dict[str, Any]:
        path, tasks = found.get("hellaswag"), found.get("tasks", [])  # --hellaswag FILE was an option of its own
        if not path or not isinstance(tasks, list):
            return found
        return found | {"tasks": [*tasks, f"hellaswag={path}" if isinstance(path, str) else path]}

    @functools.cached_property  # a step reads it
    def shape(self) -> ModelShape:
        own = ("num_layers", "num_heads", "embedding_dim", "sequence_length")
        changes = {name: getattr(self, name) for name in own if getattr(self, name)}
        if self.model_config:
            from language.options.model_config import shape_in

            published = shape_in(self.model_config)
            changes.setdefault("sequence_length", min(published.sequence_length, 4096))
            return dataclasses.replace(published, **changes)
        if self.model_size in LLAMA_SIZES:
            from language.options.llama_shape import MODEL_SIZES  # only for a run that has one of them

            published = MODEL_SIZES[self.model_size]
        else:
            published = GPT_SIZES[self.model_size]
        dataset = "text" if self.dataset == "stream" and not self.tokenizer else self.dataset  # tokens are bytes
        vocab_size = self.vocab_size or DEFAULT_VOCAB_SIZE.get(dataset, published.vocab_size)
        if not self.vocab_size and dataset not in (*DEFAULT_VOCAB_SIZE, "tokens", "stream"):
            raise InputError(
                f"dataset {dataset} has no vocabulary in DEFAULT_VOCAB_SIZE; expected one, or --vocab_size: tokens of "
                f"another one than the {published.vocab_size} of {self.model_size} would train in silence"
            )
        return dataclasses.replace(published, **changes, vocab_size=vocab_size)

    @property
    def data_paths(self) -> tuple[Path, Path | None]:
        """Paths of train_data and validation_data; the latter may be None. Raises InputError without train_data."""
        if not self.train_data:
            raise InputError(f"dataset is {self.dataset} but train_data is empty; name the data with --train_data")
        validation = Path(self.data_dir, self.validation_data) if self.validation_data else None
        return Path(self.data_dir, self.train_data), validation

    @functools.cached_property
    def num_experts(self) -> int:
        return getattr(self.shape, "num_experts", 0)

    @property
    def base_precision(self) -> str:
        """Type of LoRA's frozen weights. Without a config.json: bfloat16, the type of published weights."""
        if self.lora_base != "auto":
            return self.lora_base
        if not self.model_config:
            return "bfloat16"
        from language.options.model_config import precision_of

        return precision_of(self.model_config)

    @property
    def flops_per_token(self) -> int:
        """That of the shape. LoRA: without gradients of frozen weights, a third of their products, and adapters."""
        return self.shape.flops_per_token - (2 * self.shape.num_multiplied if self.lora_rank else 0)


def check_transformer(config: TransformerConfig) -> list[str]:
    """What does not go together in a transformer's configuration, whatever the devices and the data."""
    try:
        shape = config.shape
    except InputError as error:
        return [str(error)]
    problems = check_shape(config, shape)
    if config.model_config:
        from language.options.model_config import check_model_config

        problems += check_model_config(config)
    if config.lora_rank or config.initialise_new_tokens == "mean":
        from language.options.model_config import check_adapters  # only for a run that trains some of the weights

        problems += check_adapters(config)
    if type(shape) is not ModelShape:
        from language.options.llama_shape import check_llama

        problems += check_llama(config, shape)
    return [*problems, *check_run(config)]


def check_shape(config: TransformerConfig, shape: ModelShape) -> list[str]:
    """What layers of this shape cannot do."""
    problems = []
    if shape.embedding_dim % shape.num_heads and not getattr(shape, "head_width", 0):
        divide = [heads for heads in range(1, 1025) if shape.embedding_dim % heads == 0]
        near = [n for n in divide if n < shape.num_heads][-1:] + [n for n in divide if n > shape.num_heads][:1]
        unit = 8 * shape.num_heads  # so that the width of a head is a multiple of 8
        width = -(-shape.embedding_dim // unit) * unit
        problems.append(
            f"embedding_dim ({shape.embedding_dim}) must be divisible by num_heads ({shape.num_heads}); "
            f"try --num_heads {' or '.join(map(str, near))}, or --embedding_dim {width}"
        )
    T = shape.sequence_length
    if config.attention == "flash" and T % 128:
        problems.append(f"sequence_length is {T}; attention flash needs a multiple of 128, or choose plain")
    if config.remat_all_but >= shape.num_layers:
        problems.append(
            f"remat_all_but is {config.remat_all_but}, expected below {shape.num_layers}; all: remat_keep products"
        )
    if config.offload != "nothing" and config.scan_layers and shape.num_layers == 1:
        problems.append(
            f"offload is {config.offload}, but a loop over one layer is none, and libtpu 0.0.21 does not compile what "
            "is left of it; leave out --offload or --scan_layers"
        )
    return problems


def check_run(config: TransformerConfig) -> list[str]:
    """What stands against the data source, the batch, the number of steps and the mesh."""
    problems = []
    smallest = SMALLEST_VOCAB_SIZE.get(config.dataset, 1)
    if (vocab_size := config.shape.vocab_size) < smallest:
        problems.append(f"vocab_size is {vocab_size}; {config.dataset} needs {smallest} or more")
    if config.stream_lanes and config.global_batch_size % config.stream_lanes:
        problems.append(
            f"stream_lanes ({config.stream_lanes}) must divide global_batch_size ({config.global_batch_size}); try "
            f"{math.gcd(config.stream_lanes, config.global_batch_size)}"
        )
    if config.global_batch_size % config.gradient_accumulation_steps:
        problems.append(
            f"global_batch_size ({config.global_batch_size}) must be divisible by gradient_accumulation_steps "
            f"({config.gradient_accumulation_steps})"
        )
    if config.warmup_steps >= config.num_steps:
        problems.append(f"warmup_steps is {config.warmup_steps} but the run has {config.num_steps} steps; choose less")
    if config.mesh != "auto" and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,4}", config.mesh):
        problems.append(f"mesh is {config.mesh!r}; expected auto, or DATAxFSDPxTENSOR[xCONTEXT[xEXPERT]] such as 2x4x1")
    return problems
