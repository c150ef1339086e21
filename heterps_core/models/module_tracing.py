"""torch.fx's trace of a user's module, what each of its operations makes of synthetic rows, and what is refused.

Reed et al. 2022, "torch.fx: Practical Program Capture and Transformation for Deep Learning in Python".
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from heterps_core.errors import ConfigurationError
from heterps_core.models.slot_embedding import SlotEmbedding


def traced(model: str, module: nn.Module) -> fx.Graph:
    """Return the operations of a module whose forward takes the batch; it is left in training mode.

    Args:
        model: Its name, for messages.

    Raises:
        ConfigurationError: Its forward takes more than the batch, gives it to others than embeddings, or depends on
            values or on the mode.
    """
    graph = _traced(model, module)
    _check_embeddings(model, module, graph)
    return graph


class _UntraceableError(Exception):
    """The forward of a submodule cannot be traced."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _Tracer(fx.Tracer):
    """Looks into modules that hold others, except those of torch and those whose forward cannot be traced."""

    def __init__(self, whole: set[str]) -> None:
        super().__init__()
        self._whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_smallest = isinstance(m, SlotEmbedding) or next(m.children(), None) is None
        is_container = isinstance(m, nn.Sequential)
        return (
            module_qualified_name in self._whole
            or (is_smallest and not is_container)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except _UntraceableError:
            raise
        except Exception as error:
            if any(isinstance(part, SlotEmbedding) for part in m.modules()):
                raise
            raise _UntraceableError(self.path_of_module(m)) from error


def _traced(model: str, module: nn.Module) -> fx.Graph:
    whole: set[str] = set()
    while True:
        try:
            (in_evaluation, fixed), (graph, constants) = [
                (_Tracer(whole).trace(_without_constants(module).train(mode)), _constants(module))
                for mode in (False, True)
            ]
            break
        except _UntraceableError as found:
            whole.add(found.path)
        except Exception as error:
            raise ConfigurationError(
                f"the forward of the model {model!r} must do the same for all values, so that it can be traced and "
                f"cut, but {_where(error)}: {' '.join(str(error).split())}; move that part into a torch.nn.Module of "
                f"its own, which runs as a whole"
            ) from error
    is_same = in_evaluation.python_code("self").src == graph.python_code("self").src
    if not is_same or any(not torch.equal(value, constants[name]) for name, value in fixed.items()):
        raise ConfigurationError(
            f"the forward of the model {model!r} must not ask for self.training, or draw random numbers, as it is "
            f"traced once; take modules that do, such as torch.nn.Dropout"
        )
    return graph


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a forward made without a batch."""
    return {name: value for name, value in vars(module).items() if name.startswith("_tensor_constant")}


def _without_constants(module: nn.Module) -> nn.Module:
    """Return a module without the constants of an earlier trace, so that the next one gives the same names."""
    for name in _constants(module):
        delattr(module, name)
    return module


def _where(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    last = frames[-1]
    return f"line {last.lineno} of {last.filename.rpartition('/')[2]} does not"


def _check_embeddings(model: str, module: nn.Module, graph: fx.Graph) -> None:
    taken = [node for node in graph.nodes if node.op == "placeholder"]
    if len(taken) != 1:
        raise ConfigurationError(
            f"the forward of the model {model!r} must take the batch alone, but takes "
            f"{', '.join(str(node.target) for node in taken) or 'nothing'}"
        )
    (batch,) = taken
    if not batch.users:
        raise ConfigurationError(
            f"the model {model!r} must have a SlotEmbedding that takes the batch, but has none"
        )
    looked_up: set[object] = set()
    for user in batch.users:
        embedding = module.get_submodule(str(user.target)) if user.op == "call_module" else None
        if not isinstance(embedding, SlotEmbedding) or user.args != (batch,) or user.kwargs:
            raise ConfigurationError(
                f"the batch must be given to embeddings alone, and nothing else to them, as other layers may run "
                f"where there are no rows, but the model {model!r} has {user.format_node()}; take dense features "
                f"from the last columns of a SlotEmbedding"
            )
        if embedding.input_width or user.target in looked_up or not user.users:
            raise ConfigurationError(
                f"the embedding {user.target} of the model {model!r} must be called once, be used, and have the "
                f"input_width 0; use what it returns as often as you like"
            )
        looked_up.add(user.target)


class Probe(fx.Interpreter):
    """Runs a traced model on synthetic vectors, and notes what each operation returns and writes to.

    Attributes:
        found: What each operation returned.
        written: By an operation that writes in place, the operations and constants that it changed.
        plain: Operations of torch alone that multiply no matrices and draw no random numbers.
    """

    def __init__(self, model: str, module: nn.Module, graph: fx.Graph, *, num_rows: int) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        # An error of an operation is reported in a line.
        self.extra_traceback = False
        self._model, self._num_rows = model, num_rows
        self._generator = torch.Generator().manual_seed(0)
        self.found: dict[fx.Node, object] = {}
        self.written: dict[fx.Node, list[fx.Node]] = {}
        self.plain: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run an operation, embeddings without their tables."""
        if n.op == "placeholder":
            return None
        made = {node: value for node, value in self.found.items() if isinstance(value, Tensor)}
        versions = {node: value._version for node, value in made.items()}
        if n.op == "call_module" and isinstance(embedding := self.fetch_attr(str(n.target)), SlotEmbedding):
            # Not a leaf of autograd, which a later operation could not change in place.
            result: Any = embedding.example(self._num_rows)
            if not embedding.packs_sequences:
                result.normal_(generator=self._generator)
            result = result.requires_grad_().clone()
        else:
            try:
                operations = _Operations()
                with operations:
                    result = super().run_node(n)
                if operations.are_plain:
                    self.plain.add(n)
            except Exception as error:
                shapes = [
                    f"(rows, {', '.join(map(str, value.shape[1:]))})"
                    for node in n.all_input_nodes
                    if isinstance(value := self.found.get(node), Tensor) and node.op != "get_attr"
                ]
                raise ConfigurationError(
                    f"layer {str(n.target)!r} of the model {self._model!r} cannot take an input of shape "
                    f"{', '.join(shapes)}: {type(error).__name__}: {' '.join(str(error).split())}"
                ) from error
        changed = [node for node, value in made.items() if value._version != versions[node]]
        if changed:
            self.written[n] = changed
        self.found[n] = result
        return result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells whether all operations are torch's own, multiply no matrices and draw no random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_plain = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch loads its compiler first.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace not in ("aten", "prim") or is_random or func.overloadpacket in flop_registry:
            self.are_plain = False
        return func(*args, **(kwargs or {}))
