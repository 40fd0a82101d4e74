"""What a run that trains only some of the weights cannot be given. Imports no torch."""


def check_adapters(config) -> list[str]:
    """What stands against LoRA, and against new rows for the tokens of a chat format."""
    problems = []
    if config.lora_rank and not (config.initial_weights or config.compile_for):
        problems.append(
            f"lora_rank is {config.lora_rank}, but there are no weights to adapt; choose a folder by --initial_weights"
        )
    if config.lora_rank and config.optimizer == "muon":
        problems.append("optimizer is muon, but adapters are no matrices of a layer; expected adamw, adam or sgd")
    if config.initialise_new_tokens == "mean" and (config.lora_rank or not config.initial_weights):
        why = "adapters leave these rows as they are" if config.lora_rank else "there are no initial_weights"
        problems.append(f"initialise_new_tokens is mean, but {why}; expected a run that trains all weights of a folder")
    if config.sample_every and config.lora_rank:
        problems.append("sample_every is given, but a model with adapters is sampled by tools.generate; leave it out")
    return problems
