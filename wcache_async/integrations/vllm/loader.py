"""vLLM's model loader for the format ``wcache``: attach, or load as always and publish."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import (
    get_dp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from wcache_async.client import blocking
from wcache_async.errors import NotRunning, SourceError, StateFailed, StateNotFound
from wcache_async.integrations.vllm.config import Request, Share, model_folder, request_for
from wcache_async.integrations.vllm.options import parse_options
from wcache_async.integrations.vllm.refusals import (
    refuse_changed,
    refuse_quantized_while_loading,
    refuse_unless_plain,
)
from wcache_async.integrations.vllm.weights import layout_of, module_scalars, put_back, reshape, take
from wcache_async.modules.export import Described

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Outcome", "WeightCacheModelLoader"]

# vLLM sets up logging for names below its own.
logger = init_logger("vllm.wcache_async")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a model's weights came; `seconds` from connecting to weights in place, `nbytes` resident."""

    built_here: bool
    name: str
    rank: int
    generation: int
    transport_backend: str
    daemon_pid: int
    seconds: float
    nbytes: int

    def __str__(self) -> str:
        how = "loaded and published" if self.built_here else "attached"
        return (
            f"wcache: {how} {self.name!r} rank {self.rank}: {self.nbytes} bytes in {self.seconds:.3f} s "
            f"(generation {self.generation}, {self.transport_backend}, daemon {self.daemon_pid})"
        )


class WeightCacheModelLoader(BaseModelLoader):  # type: ignore[misc]
    """The loader vLLM makes for ``load_format="wcache"``; the extra config is `options.Options`'s.

    Weights are never read from disk unless this engine is the one to publish them: what the
    daemon cannot give is an error, and the engine does not start.  `outcome` says how they came.
    The state is held until the process ends.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = parse_options(load_config.model_loader_extra_config)
        self.outcome: Outcome | None = None

    # ------------------------------------------------------------------- what vLLM calls
    def download_model(self, model_config: Any) -> None:
        """Fetch the checkpoint's files, as the default loader does."""
        self._from_disk().download_model(model_config)

    def load_weights(self, model: "nn.Module", model_config: Any) -> None:
        """Not possible: in place, weights would be written over that other engines read too."""
        raise NotImplementedError(
            "a running engine cannot reload its weights from the cache; start it anew, "
            "or use another load format for weights that change"
        )

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> "nn.Module":
        """The model with its weights, post-processed by vLLM itself."""
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        request = self._request(vllm_config, model_config)
        started = time.perf_counter()
        with set_default_torch_dtype(model_config.dtype):
            client = self._connected()
            try:
                loading = _Loading(self, vllm_config, model_config, prefix, device)
                if self.options.on_missing == "error":
                    state = client.fetch_state(
                        request.name, rank=request.rank, expect=request.config, timeout=self.options.timeout
                    )
                else:
                    state = client.fetch_or_publish(
                        request.name,
                        loading.from_disk,
                        rank=request.rank,
                        config=request.config,
                        timeout=self.options.timeout,
                    )
                model = loading.attached(state)
            except BaseException:
                client.close()
                raise
            self.outcome = Outcome(
                built_here=state.built_here,
                name=state.name,
                rank=state.rank,
                generation=state.generation,
                transport_backend=state.transport_backend,
                daemon_pid=state.daemon_pid,
                seconds=time.perf_counter() - started,
                nbytes=state.resident_bytes,
            )
            logger.info("%s", self.outcome)
            loading.finish(model)
        # The loader is dropped by vLLM, and with it would go what it tells.
        model.__dict__["weight_cache_loader"] = self
        return model.eval()

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes on this engine's device that the daemon holds for it already; vLLM sizes its cache by them."""
        speculative = vllm_config.speculative_config
        models = [vllm_config.model_config]
        if speculative is not None and speculative.draft_model_config is not None:
            models.append(speculative.draft_model_config)
        kind = torch.device(vllm_config.device_config.device).type
        with self._connected() as client:
            return sum(self._held_bytes(client, self._request(vllm_config, model), kind) for model in models)

    # -------------------------------------------------------------------------- in pieces
    def _held_bytes(self, client: blocking.Client, request: Request, kind: str) -> int:
        try:
            state = client.fetch_state(
                request.name, rank=request.rank, expect=request.config, timeout=self.options.timeout
            )
        except (StateNotFound, StateFailed):
            return 0  # This engine will load it, into memory of its own.
        with state:
            on_device = [arena for arena in state.manifest.arenas if (arena.device == "cpu") == (kind == "cpu")]
            return sum(arena.nbytes for arena in on_device)

    def _connected(self) -> blocking.Client:
        try:
            return blocking.Client(self.options.socket, name="vllm").__enter__()
        except NotRunning as error:
            raise NotRunning(
                socket=error.socket,
                reason=error.reason,
                instead="leave --load-format wcache out, to load without the cache",
            ) from error

    def _from_disk(self) -> DefaultModelLoader:
        config = dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        return DefaultModelLoader(config)

    def _request(self, vllm_config: Any, model_config: Any) -> Request:
        where = model_config.model, model_config.revision, self.load_config.download_dir
        folder = model_folder(*where)
        if folder is None:
            self.download_model(model_config)
            folder = model_folder(*where)
        if folder is None:
            raise SourceError(path=model_config.model, reason="it is no folder, and no model that the hub could give")
        return request_for(vllm_config, model_config, _share(vllm_config.parallel_config), self.options, folder=folder)


class _Loading:
    """One model on its way: built for real or on meta, its weights put in, and finished."""

    def __init__(
        self, loader: WeightCacheModelLoader, vllm_config: Any, model_config: Any, prefix: str, device: torch.device
    ) -> None:
        self._loader = loader
        self._processed = loader.options.stage == "processed"
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._prefix = prefix
        self._device = device
        self._model: nn.Module | None = None

    def from_disk(self) -> Described:
        """Load the model as vLLM does without the cache; what of it is cached.

        Raises ModuleError for what would not be the same in another process.
        """
        model = self._model = self._initialized(self._device)
        refuse_quantized_while_loading(model)
        scalars = module_scalars(model)
        layout = layout_of(take(model))
        with self._device:
            self._loader._from_disk().load_weights(model, self._model_config)
            if self._processed:
                refuse_unless_plain(model, lambda: self._process(model))
        taken = take(model, helpers=not self._processed)
        if not self._processed:
            refuse_changed(layout, layout_of(taken))
        changed = {
            name: value
            for name, value in module_scalars(model).items()
            if name not in scalars or scalars[name] != value
        }
        return Described(taken.walked, changed, source=f"vLLM {type(model).__name__}")

    def attached(self, state: blocking.State) -> "nn.Module":
        """The model on the state's memory.  Raises BindError."""
        model = self._model
        if model is None:
            model = self._initialized(torch.device("meta"))
            if self._processed:
                reshape(model, state.manifest)
        taken = take(model, device=self._device, helpers=not self._processed)
        put_back(taken, self._on_device(state.import_tensors()), state.manifest, state.backend)
        return model

    def finish(self, model: "nn.Module") -> None:
        """Post-process the weights, or what of it is no tensors."""
        with self._device:
            if not self._processed:
                self._process(model)
            elif self._model is None:
                with weights_already_processed():
                    self._process(model)

    def _initialized(self, device: torch.device) -> "nn.Module":
        try:
            with device:
                model: nn.Module = initialize_model(
                    vllm_config=self._vllm_config, model_config=self._model_config, prefix=self._prefix
                )
        except Exception as error:
            if device.type == "meta":
                error.add_note(
                    "The model was being built on meta, for weights from the cache; if that is what it cannot do, "
                    "it needs another load format."
                )
            raise
        return model

    def _process(self, model: "nn.Module") -> None:
        process_weights_after_loading(model, self._model_config, self._device)

    def _on_device(self, tensors: "Mapping[str, torch.Tensor]") -> "Mapping[str, torch.Tensor]":
        copied: dict[int, torch.Tensor] = {}
        for tensor in tensors.values():
            if tensor.device.type != self._device.type:
                copied[id(tensor)] = tensor.to(self._device)
        return {name: copied.get(id(tensor), tensor) for name, tensor in tensors.items()}


def _share(parallel: Any) -> Share:
    tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    pipeline = get_pp_group()
    ep_size, ep_rank = 1, 0
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        # Each of vLLM's replicas has experts of its own; its tensor parallel ranks say the rest.
        ep_size, ep_rank = parallel.data_parallel_size, get_dp_group().rank_in_group
    return Share(tp_size, tp_rank, pipeline.world_size, pipeline.rank_in_group, ep_size, ep_rank)
