"""What goes into a message comes out of it: orders, and every error of the tree."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from underpaint import errors
from underpaint.errors import EngineFailure, UnderpaintError
from underpaint.handover import faults
from underpaint.handover.arena import Slab
from underpaint.handover.messages import (
    Bring,
    Cancel,
    Coming,
    Edit,
    ErrorData,
    Euler,
    Failed,
    Flow,
    Fresh,
    InPages,
    JobAt,
    Kept,
    OpenArena,
    OpenPool,
    Paint,
    Painted,
    PaintOrder,
    Plain,
    Progress,
    Release,
    Seed,
    Stored,
    TensorAt,
    ToGeneration,
    ToUnderstanding,
)
from underpaint.kv.pool import Run
from underpaint.kv.tree import Unit
from underpaint.layout import Layout
from underpaint.models.neo_unify.guidance import NORMS
from underpaint.sampling.guidance import Branch
from underpaint.server import faults as server_faults


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


sizes = st.integers(0, 2**40)
single = st.floats(width=32, allow_nan=False)
grids = st.tuples(st.integers(1, 64), st.integers(1, 64))
slabs = st.builds(Slab, sizes, sizes, sizes)
tensors = st.builds(
    TensorAt, slabs, sizes, st.sampled_from(["float32", "float16", "bfloat16"]), st.tuples(sizes, sizes)
)
layouts = st.builds(Layout.of, st.lists(st.integers(1, 200) | grids, max_size=8))
units = st.lists(st.builds(Unit, sizes, sizes, st.binary(max_size=32)), max_size=4).map(tuple)
intervals = st.tuples(single, single)
norms = st.sampled_from(NORMS)
levels = st.lists(single, max_size=60).map(tuple)
guidance = st.builds(Paint, single, norms, intervals) | st.builds(Edit, single, single, norms, intervals)
samplers = st.builds(Euler, levels, st.builds(Plain, single)) | st.builds(Flow, levels, guidance)
runs = st.builds(Run, several(sizes), sizes)
conditions = st.builds(Fresh, layouts, units, tensors, several(tensors)) | st.builds(Stored, layouts, several(sizes))
jobs = st.builds(
    JobAt,
    grids,
    tensors | st.builds(Seed, st.integers(0, 2**63 - 1)),
    samplers,
    st.dictionaries(st.sampled_from(Branch), sizes),
    several(sizes),
)
prefixes = st.none() | st.builds(InPages, several(runs), several(st.none() | st.binary()), st.text())
ids = st.text(max_size=40)
orders = st.builds(PaintOrder, ids, several(conditions), several(jobs), prefixes, st.none() | st.floats(0, 1e9))
failures = st.builds(
    Failed, ids, st.builds(ErrorData, ids, st.text(), st.dictionaries(ids, st.none() | st.booleans() | sizes | ids))
)
pools = st.builds(OpenPool, sizes, sizes, sizes, st.just("bfloat16"), ids, sizes, sizes, st.none() | st.binary())
to_generation = (
    orders
    | pools
    | st.builds(Coming, ids, slabs)
    | st.builds(OpenArena)
    | st.builds(Cancel, ids)
    | st.builds(Release, several(slabs))
)
to_understanding = (
    st.builds(Bring, ids, several(sizes))
    | st.builds(Progress, ids, several(sizes))
    | st.builds(Kept, ids, sizes, sizes, tensors)
    | st.builds(Painted, ids, several(tensors), sizes, st.floats(0, 1e9))
    | failures
)


def again(message: msgspec.Struct, spoken: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=spoken)


@given(to_generation)
def test_what_understanding_says_arrives_as_it_was(message: msgspec.Struct) -> None:
    got = again(message, ToGeneration)
    assert got == message
    assert type(got) is type(message)


@given(to_understanding)
def test_what_generation_says_arrives_as_it_was(message: msgspec.Struct) -> None:
    got = again(message, ToUnderstanding)
    assert got == message
    assert type(got) is type(message)


@given(levels)
def test_fp32_levels_are_exact(values: tuple[float, ...]) -> None:
    got = again(Euler(values, Plain(1.0)), Euler)
    assert struct.pack(f"{len(values)}f", *got.sigmas) == struct.pack(f"{len(values)}f", *values)


def every_error() -> list[UnderpaintError]:
    """One of each class of the tree, made as it is made in earnest."""
    arguments: dict[type[UnderpaintError], tuple[Any, ...]] = {
        errors.PromptTooLong: (9000, 8192),
        errors.BudgetTooSmall: (2**33, 2**32),
        errors.MissingBranch: ("pictures",),
        server_faults.QueueFull: (3,),
    }
    classes = [
        value
        for module in (errors, faults, server_faults)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, UnderpaintError) and value.__module__ == module.__name__
    ]
    assert len(classes) > 20
    made = [kind(*arguments.get(kind, ("one sentence: größer als 5",))) for kind in classes]
    return [*made, errors.BadParameter("n must be at least 1", param="n"), errors.BadSize("too wide", param="width")]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_on_the_other_side(error: UnderpaintError) -> None:
    got = again(Failed("order", ErrorData.of(error)), ToUnderstanding).error.error()
    assert type(got) is type(error)
    assert (str(got), got.args, vars(got)) == (str(error), error.args, vars(error))
    assert (got.code, got.status) == (error.code, error.status)
    with pytest.raises(type(error)):
        raise got


def test_an_error_of_a_class_that_is_not_loaded_is_named() -> None:
    got = ErrorData("Elsewhere", "it broke", {}).error()
    assert type(got) is EngineFailure
    assert str(got) == "Elsewhere: it broke"


def test_no_class_outside_the_tree_is_made() -> None:
    assert type(ErrorData("SystemExit", "no", {}).error()) is EngineFailure
