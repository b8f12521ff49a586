"""Bodies drawn at random from our own OpenAPI document: never an error of the server's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.tools import Running

EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=[Phase.generate]
)


CHECKS = (
    schemathesis.checks.not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
)  # fmt: skip


def operations_of(server: Running) -> list[Any]:
    """Every operation of the server's document."""
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    return [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]


def assert_documented(case: schemathesis.Case, url: str) -> None:
    """Never a fault of the server's own; status, kind and shape of the answer are those of the document."""
    response = case.call(base_url=url)
    case.validate_response(response, checks=list(CHECKS))
    if response.status_code >= 400:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_s27_random_requests(start: Callable[..., Running]) -> None:
    """Of every kind, to a painter that is as small as it can be."""
    server = start(max_steps=4, max_output_pixels=64 * 64)
    operations = operations_of(server)
    assert len(operations) >= 10

    @EXAMPLES
    @given(case=st.one_of(*(operation.as_strategy() for operation in operations)))
    def try_one(case: schemathesis.Case) -> None:
        assert_documented(case, server.url)

    try_one()
    server.idle()


def test_s27_random_dialogues(start: Callable[..., Running], talker_root: Path) -> None:
    """Their answers are kept short: random weights hardly ever come to an end by themselves."""
    server = start(talker_root, max_steps=4, max_output_pixels=64 * 64)
    short = {
        "/v1/chat/completions": {
            "max_tokens": 2, "max_completion_tokens": None, "think": False, "max_think_tokens": None,
        },
        "/v1/responses": {"max_output_tokens": 2, "reasoning": None},
    }  # fmt: skip
    operations = [operation for operation in operations_of(server) if operation.path in short]
    assert len(operations) == len(short)

    @EXAMPLES
    @given(case=st.one_of(*(operation.as_strategy() for operation in operations)))
    def try_one(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body |= short[case.operation.path]
        assert_documented(case, server.url)

    try_one()
    server.idle()
