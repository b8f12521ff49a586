"""A picture of NaN over HTTP: an error, told once, and the next request is served."""

import json
from collections.abc import Callable

import torch

from server.tools import Running, service_of

Start = Callable[..., Running]


def test_it_is_an_error_and_the_next_is_served(start: Start) -> None:
    server = start()
    weight = service_of(server.site).qwen.transformer.proj_out.weight
    sound = weight[0].clone()
    with torch.inference_mode():
        weight[0] = torch.nan
    answer = server.paint()
    with server.painting() as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    with torch.inference_mode():
        weight[0] = sound
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_failure"
    assert "the picture's values are not finite" in answer.json()["error"]["message"]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["type"], last["error"]["code"]) == ("error", "engine_failure")
    assert server.paint().status_code == 200
