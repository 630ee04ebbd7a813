"""A loader whose weights are not in the model's folder, which workers register as they import this."""

from typing import Any

from safetensors.torch import load_file
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader


@register_model_loader("remote")
class RemoteLoader(BaseModelLoader):
    """`model_loader_extra_config` names the `source`."""

    def download_model(self, model_config: Any) -> None:
        """Nothing is kept."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        extra: Any = self.load_config.model_loader_extra_config
        model.load_weights(load_file(extra["source"]).items())


class Extension:
    """vLLM imports this module to extend its worker with this class."""
