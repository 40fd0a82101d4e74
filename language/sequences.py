"""The data and the tasks that the options of transformer_tpu.py name, checked. Imports no torch.

A source is a module of language/data with the name of its --dataset, which Dataset of transformer_options.py lists:
check(config) reads little, before torch is imported; load(config, process_index, process_count) gives its rows.
"""

import dataclasses
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from language.data.sequence_data import MicroBatches, SequenceData
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError


def source_of(config: TransformerConfig) -> Any:
    return import_module(f"language.data.{config.dataset}")


def load_sequences(config: TransformerConfig, process_index: int = 0, process_count: int = 1) -> SequenceData:
    """The data the config names, checked; of several processes each gets its rows. Raises InputError."""
    if config.compile_for:  # the TPU compiler needs no data: zeros in the shape of a batch
        tokens = np.zeros((config.global_batch_size, config.shape.sequence_length + 1), np.int32)
        same = SimpleNamespace(batch=lambda step: tokens)
        return SequenceData(config, same, same, 0, "none: nothing runs", 0)
    data = source_of(config).load(config, process_index, process_count)
    parts = config.gradient_accumulation_steps  # no more rows at a time than in training, and as many in all
    validation, batches = MicroBatches(data.validation, parts), parts * data.validation_batches
    return dataclasses.replace(data, validation=validation, validation_batches=batches)


def load_tasks(config: TransformerConfig, part: int = 0, num_parts: int = 1) -> Any:
    """The Harness of --tasks, or in its place one without batches. part: of num_parts hosts. Raises InputError."""
    if not config.tasks or config.compile_for:
        return SimpleNamespace(batches=())
    from language.tasks import scores  # only for a run that is asked questions

    return scores.load_tasks(config, part, num_parts)


def check_files(config: TransformerConfig) -> None:
    """Raises InputError when the files that config names are missing or damaged. Reads little, and imports no torch."""
    if config.initial_weights:
        from language.options.model_config import check_initial_weights  # only for a run that has some

        check_initial_weights(config)
    elif config.preset.startswith("finetune") and config.model_size == "tiny" and not config.model_config:
        raise InputError(f"preset {config.preset} found no model to start from; name a folder: --initial_weights")
    if config.compile_for:
        return
    if config.sample_every:
        from language.generation.sample_prompts import ask_of_run  # only for a run that is sampled

        ask_of_run(config)
    if config.tasks:
        from language.tasks.scores import check_tasks_of_run  # only for a run that is asked questions

        check_tasks_of_run(config)
    source_of(config).check(config)
