"""Samples of a model while it trains, by the two graphs of tools.generate. They change nothing of the run."""

from language.models.layers import Decoder
from language.options.transformer_options import TransformerConfig
from tpu_utils.device import get_rng_state, graphs_compiled, set_rng_state
from tpu_utils.run import Run


def write_samples(run: Run, step: int, model: Decoder, config: TransformerConfig) -> None:
    """Every sample_every steps and at the end: what follows each prompt, on the terminal, in metrics.jsonl and in
    TensorBoard. Reads the weights and draws from the step's own seed, so a run ends with the same bits without it."""
    if not config.sample_every or (step % config.sample_every and step != config.num_steps):
        return
    from language.generation.decoding import generate  # only for a run that is sampled
    from language.generation.sample_prompts import ask_of_run, sampling_options

    before, random_state = graphs_compiled(), get_rng_state()
    with run.phase("evaluation"):
        tokenizer, asked = ask_of_run(config)
        options = sampling_options(config, step)
        found = generate(model, asked.prompts, options, run.device, asked.ends, stops=asked.stops)
    set_rng_state(random_state)  # torch_xla's, which every graph that runs advances
    graphs = graphs_compiled() - before  # prefill and decode, the first time; then none
    texts = [tokenizer.decode(tokens[:-1] if tokens[-1] in asked.stops else tokens) for tokens in found]
    run.log_samples(step, graphs, zip(config.sample_prompts, texts, strict=True))
