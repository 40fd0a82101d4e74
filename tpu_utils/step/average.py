"""An average of the weights (EMA), kept inside the compiled step."""

import torch


def update_average(average: torch.nn.Module, model: torch.nn.Module, decay: float, step: torch.Tensor) -> None:
    """Moves an average of the weights towards the model's, inside the compiled step, after the optimizer's update.

    Floating parameters and buffers become d x average + (1 - d) x model, others are copied. d = min(decay, (1 + t) /
    (10 + t)), where t is the value of step, (1,) int32 on the device: early on, the average forgets the first weights.
    average: a second copy of the model on the device, for evaluation. Make it on the host:

        model = build_model()
        average = copy.deepcopy(model).to(device).eval()  # before model.to(device): copies on the device are a graph
        model.to(device)
        run.track(model=model, average=average, ...)

    On a mesh give the tensors of both the same sharding.
    """
    pairs = []
    for kind in ("named_parameters", "named_buffers"):
        old, new = (dict(getattr(module, kind)()) for module in (average, model))
        if [(n, t.shape, t.dtype) for n, t in old.items()] != [(n, t.shape, t.dtype) for n, t in new.items()]:
            raise ValueError("average has other parameters or buffers than model; expected copy.deepcopy(model)")
        pairs += [(old[name], new[name]) for name in new]
    count = step.float()
    rate = (1 - ((1 + count) / (10 + count)).clamp(max=decay)).view(())
    with torch.no_grad():
        for old, new in pairs:
            if old is new:
                raise ValueError("average shares a tensor with model; expected copy.deepcopy(model)")
            old.copy_(torch.lerp(old, new, rate.to(new.dtype)) if new.is_floating_point() else new)
