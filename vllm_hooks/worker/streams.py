"""Work on a GPU behind what the model's stream was given, from threads beside the model's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def model_event(device: torch.device) -> torch.cuda.Event | None:
    """What the model's stream has been given up to now; None where the model has none. For the model's thread."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()


@contextmanager
def behind(model: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """GPU work in this context runs on a stream of its own, after what the model's stream was given before."""
    if model is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(model)
    with torch.cuda.stream(stream):
        yield
