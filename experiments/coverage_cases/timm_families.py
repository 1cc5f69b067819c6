"""One small member of every family of timm, with the smallest input it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from experiments.coverage_cases.made import Build, Made

# The first of these in a name makes it the family's small member; names without any come last.
_SMALL = (
    "test_", "atto", "femto", "pico", "nano", "xxs", "xx_small", "extra_small", "xs", "tiny", "xtiny", "mini", "micro", "_050", "_s0",
    "_b0", "_l0", "_0", "small", "18", "m0", "_s", "x0", "26", "19", "39", "50",
)  # fmt: skip
_SIZES = (64, 96, 128, 160, 192)
# Families whose names do not say which member is small, or that have no small one.
_MEMBER = {"densenet": "densenet121", "vgg": "vgg11_bn", "tresnet": "tresnet_m", "levit": "levit_128s", "rexnet": "rexnet_100"}
_SHALLOW: dict[str, dict[str, int]] = {
    name: {"depth": 2}
    for name in (
        "deepseek_vit_412m",
        "gemma4_vit_167m",
        "qwen3_vit_88m",
        "samvit_base_patch16",
        "beit_base_patch16_224",
    )
}


def cases() -> dict[str, Build]:
    """Case name to builder: by module of timm, the member whose name says it is small."""
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    # timm imports it, and so does transformers.
    import_torchvision()
    import timm

    found: dict[str, Build] = {}
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            chosen = _MEMBER.get(module, min(names, key=_rank))
            found[f"timm:{chosen}"] = partial(_build, chosen)
    return found


def _rank(name: str) -> tuple[int, int, str]:
    place = next((index for index, word in enumerate(_SMALL) if word in name), len(_SMALL))
    return place, len(name), name


def _build(name: str) -> Made:
    import timm

    shallow = _SHALLOW.get(name, {})
    for size in _SIZES:
        for options in (shallow, {**shallow, "img_size": size}):
            made = _try(timm, name, size, options)
            if made is not None:
                return made
    model = timm.create_model(name, pretrained=False, **shallow).eval()
    return Made(model, (torch.randn(1, *model.pretrained_cfg.get("input_size", (3, 224, 224))),))


def _try(timm: Any, name: str, size: int, options: dict[str, int]) -> Made | None:
    try:
        model = timm.create_model(name, pretrained=False, **options).eval()
        images = torch.randn(1, 3, size, size)
        with torch.no_grad():
            model(images)
    except Exception:  # Whatever a model says to a size that it does not take.
        return None
    return Made(model, (images,))
