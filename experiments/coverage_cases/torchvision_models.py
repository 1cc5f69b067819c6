"""torchvision's classifiers, segmentation, detection, optical flow and video models, small inputs."""

from __future__ import annotations

from functools import partial

import torch

from experiments.coverage_cases.made import Build, Made

# Beyond this a model only takes longer: its family has smaller members.
_MOST_PARAMETERS = 60_000_000
_DETECTORS = ("ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn")
_FIXED_SIZE = ("vit_", "maxvit", "inception_v3", "quantized_inception_v3")


def cases() -> dict[str, Build]:
    """Case name to builder, in the library's own order."""
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    models = import_torchvision().models
    found: dict[str, Build] = {}
    for name in models.list_models():
        weights = models.get_model_weights(name)
        best = next(iter(weights)) if len(weights) else None
        if best is not None and best.meta["num_params"] > _MOST_PARAMETERS:
            continue
        folder = models.get_model_builder(name).__module__.split(".")[2]
        if folder == "detection" and name not in _DETECTORS:
            continue
        found[f"torchvision:{name}"] = partial(_build, name, folder)
    return found


def _build(name: str, folder: str) -> Made:
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    models = import_torchvision().models
    options: dict[str, object] = {"weights": None}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    if folder in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if folder == "quantization":
        options["quantize"] = False
    model = models.get_model(name, **options)
    if folder == "detection":
        return Made(model, ([torch.rand(3, 96, 96)],))
    if folder == "optical_flow":
        return Made(model, (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), {"num_flow_updates": 2})
    if folder == "video":
        size = 224 if name.startswith(("mvit", "s3d")) else 64
        frames = 16 if name.startswith(("mvit", "s3d")) else 4
        return Made(model, (torch.randn(1, 3, frames, size, size),))
    size = 224 if name.startswith(_FIXED_SIZE) else 64
    return Made(model, (torch.randn(1, 3, 75 if "inception" in name else size, 75 if "inception" in name else size),))
