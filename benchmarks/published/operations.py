"""The two operations whose times others have published: a product of matrices and a copy.

Run:     python aot_tpu.py benchmarks/published/operations.py:Product --mode forward --topology v6e-1 \
             --inputs 'bfloat16[8192,8192]' 'bfloat16[8192,8192]'
         python aot_tpu.py benchmarks/published/operations.py --topology tpu7x-2 --compiler newest --product 8192
             as a script: on one device of the chip's two, where a module would have its first axis on both; or
             --copy 16777216
"""

import argparse

import torch
from torch import nn


class Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


class Copy(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.clone()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile_for", required=True, metavar="SLICE", help="aot_tpu.py gives it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--product", type=int, metavar="N", help="multiply two N x N matrices of bfloat16")
    what.add_argument("--copy", type=int, metavar="N", help="copy N values of bfloat16")
    arguments = parser.parse_args()
    from tpu_utils.options.virtual_slice import prepare_environment

    prepare_environment(arguments.compile_for)  # before torch_xla is imported
    import torch_xla

    from tpu_compiler.ask import compile_for

    operation, shape = (Product(), (arguments.product,) * 2) if arguments.product else (Copy(), (arguments.copy,))
    # not computed before the step is traced: they never have memory
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="xla") for _ in range(2 if arguments.product else 1)]
    step = torch_xla.compile(lambda *tensors: operation(*tensors), full_graph=True, name="operation")
    return compile_for(arguments.compile_for, step, *inputs, examples=1)


if __name__ == "__main__":
    raise SystemExit(main())
