"""What transformer_tpu.py trains. Rooms, from the ground up; none imports from one further down this list:

options/     shapes, families and config.json of models; TransformerConfig. Imports no torch
xla/         loops, recomputation, context, shards and kernels: what is made of torch_xla's and jax's insides
data/        tokens, text, chats, streams and their tokenizers; llm.c's files
models/      GPT and Llama: layers, operations, experts and their router, int8, muon
weights/     Hugging Face's and llm.c's files in and out, adapters, those of a run
tasks/       questions, and how an answer is scored
generation/  decoding with a cache, sampling, samples while training
build, mesh, sequences  choose among them for a run: the model, its mesh, the batches
"""
