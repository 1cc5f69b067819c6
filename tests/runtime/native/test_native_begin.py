"""The beginning of a native run on threads: what it has made is given back, whatever comes before anybody knows of it."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import random

import pytest
import torch

from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.native.build import native_library
from autosched.runtime.native.lanes import NativePlan
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_placement
from tests.conformance.programs import branches_program

pytestmark = pytest.mark.usefixtures("native")


def test_a_run_whose_beginning_is_interrupted_is_given_back() -> None:
    library = native_library()
    assert library is not None
    begun: list[int] = []

    def begin(program: int, place: int, *rest: object) -> None:
        library.begin(program, place, *rest)
        begun.append(ctypes.c_int64.from_address(place).value)
        raise KeyboardInterrupt

    deleted: list[int] = []

    def delete(run: int) -> None:
        deleted.append(run)
        library.delete_run(run)

    bound = bind(*branches_program())
    graph = bound.program.graph
    plan = make_plan(graph, random_placement(random.Random(0), graph, 2))
    native = NativePlan(library, bound, [plan.of_lane(lane) for lane in range(2)], 0.0)._of_lanes
    native._library = dataclasses.replace(library, begin=begin, delete_run=delete)
    inputs = random_inputs(bound.program, 0)
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        native.run(inputs, None, LanePool())
    gc.collect()
    assert begun == deleted != []
