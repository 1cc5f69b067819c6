"""Which models are of one family: a cost model is judged by families that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import autosched.datasets
from autosched.datasets.splits import family_of

SHIPPED = sorted(path.parent for path in (Path(autosched.datasets.__file__).parent / "data").glob("*/about.json"))


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("torchvision:mnasnet0_5", "mnasnet"),
        ("timm:nasnetalarge", "nasnet"),
        ("timm:pnasnet5large", "nasnet"),
        ("transformers:distilbert", "bert"),
        ("timm:legacy_seresnext50_32x4d", "resnext"),
        ("torchvision:wide_resnet50_2", "resnet"),
        ("torchvision:vit_b_16", "vit"),
        ("transformers:t5", "t5"),
        ("mine:flan_t5", "t5"),
        ("mine:net5", "net"),
        ("mine:unet512", "unet"),
        ("mine:gravity", "gravity"),
        # Of one's own: the project's way of naming a function must not make one family of all models.
        ("shop.models:make_ranker", "ranker"),
        ("shop.models:make_reader", "reader"),
        ("shop.ranker:make", "ranker"),
        ("shop.ranker:build_model", "ranker"),
        ("shop.bert:make_ranker", "ranker"),
        ("shop.models:make_resnet", "resnet"),
        ("make:make", "make"),
        # Files: the folder that they lie in is no family.
        ("/home/bert/exported/ranker_v2.pt2", "ranker"),
        ("/srv/runs_1/reader.pt2", "reader"),
        ("./ranker.pt2", "ranker"),
        ("models/my_model_googlenet.pt2", "googlenet"),
        ("model.pt2", "model"),
    ],
)
def test_a_name_within_another_word_is_no_family(model: str, family: str) -> None:
    assert family_of(model) == family


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_runs_that_ship_are_of_the_family_that_they_say(folder: Path) -> None:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    for table in (table for table in ("solo", "pairs", "groups", "schedules", "graphs") if about["rows"][table]):
        named = pd.read_parquet(folder / table)[["model", "family"]].drop_duplicates()
        assert len(named)
        assert list(named["family"]) == [family_of(model) for model in named["model"]]
