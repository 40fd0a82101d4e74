"""Says what new pictures show, by the newest checkpoint of a run, in plain PyTorch: no TPU needed.

Run:     python classify.py DATA RUN PICTURE [PICTURE ...]        # DATA: what make_arrays.py wrote
"""

import json
import sys
from pathlib import Path

import safetensors.torch
import torch
from make_arrays import read_picture
from my_model import Net

from tpu_utils.base.errors import InputError, first_line, run_script


def main() -> int:
    if len(sys.argv) < 4:
        raise InputError("found too few words; expected DATA RUN PICTURE")
    data, run, *pictures = map(Path, sys.argv[1:])
    checkpoints = sorted(run.glob("checkpoints/step_*/state.safetensors"))
    if not checkpoints or not (data / "classes.json").exists():
        raise InputError(f"expected {data}/classes.json, and {run}/checkpoints with a finished checkpoint")
    known = json.loads((data / "classes.json").read_text())
    saved = safetensors.torch.load_file(checkpoints[-1])
    model = Net(len(known["classes"])).eval()
    try:
        model.load_state_dict({k.removeprefix("model/"): v for k, v in saved.items() if k.startswith("model/")})
    except RuntimeError as error:
        raise InputError(
            f"{checkpoints[-1]} is of another model than my_model.py makes for {', '.join(known['classes'])}: "
            f"{first_line(error)}; expected a run that was trained on {data}"
        ) from error
    for path in pictures:
        with torch.no_grad():
            shares = model(torch.tensor(read_picture(path, known["size"]))[None]).softmax(1)[0]
        best = shares.argmax().item()
        print(f"{path}: {known['classes'][best]}, {shares[best]:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
