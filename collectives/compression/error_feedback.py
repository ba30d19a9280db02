"""Error feedback: the residuals of compressed gradients, which are added to the next step's
gradients.
"""

from __future__ import annotations

import weakref

import torch

from ..cuda_state import refuse_capture
from ..errors import InvalidArgument
from ..parameter_names import ParameterNames
from .bucket import Bucket
from .scratch import use_on_current_stream

__all__ = ["Residuals"]


class _FlatResiduals:
    """Residuals of one bucket, and the CUDA stream that has used them last."""

    __slots__ = ("checked", "stream", "values")

    def __init__(self, values: torch.Tensor):
        self.values = values
        self.stream = None
        self.checked: tuple | None = None  # (`Residuals._version`, ids of parameters, their offsets): whose these are
        self.use()

    def use(self) -> torch.Tensor:
        """Return the values, ordered on torch's current stream."""
        self.stream = use_on_current_stream(self.stream, self.values)
        return self.values


class Residuals:
    """Compression errors of the gradients so far, in fp32, by parameter.

    The residuals of a bucket lie in one flat tensor, in the order of the bucket. They move to
    another tensor when the buckets change. A residual that was loaded by name waits until its
    parameter comes.
    """

    def __init__(self, parameter_names: ParameterNames | None = None):
        self._parameter_names = parameter_names or ParameterNames()
        # id of a parameter -> (weak reference to it, its view, the flat residuals of the view, the
        # view's offset)
        self._views: dict[int, tuple] = {}
        self._version = 0  # another one after each change of `_views`
        self._loaded: dict[str, torch.Tensor] = {}

    def get(self, bucket: Bucket) -> torch.Tensor:
        """Return the residuals of a bucket: fp32, as long as ``bucket.flat``, on its device.

        A new bucket's are 0.
        """
        count, views = bucket.flat.numel(), self._views
        first = views.get(id(bucket.params[0]))
        home = None if first is None else first[2]
        if home is not None and home.values.numel() == count and home.values.device == bucket.flat.device:
            checked = (self._version, list(map(id, bucket.params)), bucket.offsets)
            if home.checked == checked:
                return home.use()
            known = zip(map(views.get, map(id, bucket.params)), bucket.params, bucket.offsets, strict=True)
            if all(v is not None and v[0]() is param and v[2] is home and v[3] == at for v, param, at in known):
                home.checked = checked
                return home.use()
        refuse_capture(bucket.flat.device, "each replay would set a new bucket's residuals to 0: make steps first")
        flat = torch.zeros(count, dtype=torch.float32, device=bucket.flat.device)
        home = _FlatResiduals(flat)
        names = self._parameter_names.lookup(bucket.params) if self._loaded else [None] * len(bucket.params)
        ends = [*bucket.offsets[1:], count]
        for param, name, begin, end in zip(bucket.params, names, bucket.offsets, ends, strict=True):
            # Padding may follow a parameter; it has no residual.
            end = min(end, begin + (param.numel() << param.is_complex()))
            view, old = flat[begin:end], views.get(id(param))
            if old is not None and old[0]() is param and old[1].numel() == view.numel():
                old[2].use()  # the residuals of another bucket, whose last stream may be another one
                view.copy_(old[1])
            elif name is not None and name in self._loaded:
                loaded = self._loaded.pop(name)
                if loaded.numel() != view.numel():
                    raise InvalidArgument(
                        f"the loaded residual of {name} has {loaded.numel()} elements, its gradient {view.numel()}"
                    )
                view.copy_(loaded)
            views[id(param)] = (self._weak_reference(param), view, home, begin)
        self._version += 1
        return flat

    def _weak_reference(self, param) -> weakref.ref:
        """Return a weak reference to a parameter; its residual is dropped when it dies."""
        views, key, owner = self._views, id(param), weakref.ref(self)

        def drop(reference):
            if key in views and views[key][0] is reference:
                del views[key]
                # Another parameter may get this one's id.
                if (residuals := owner()) is not None:
                    residuals._version += 1

        return weakref.ref(param, drop)

    def unclaimed_names(self) -> list[str]:
        """Return the names of loaded residuals whose parameter has not come."""
        return list(self._loaded)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies on the host, by parameter name.

        Raises `InvalidArgument` where a parameter is in no registered module and so has no name.
        """
        found = dict(self._loaded)
        views = [(reference(), view) for reference, view, _, _ in list(self._views.values())]
        views = [(param, view) for param, view in views if param is not None]
        names = self._parameter_names.lookup(param for param, _ in views)
        for name, (param, view) in zip(names, views, strict=True):
            if name is None:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(param.shape)} has no name, by which its residual could be saved: let "
                    "the state know its module, state.register(module)"
                )
            found[name] = view.detach().cpu().clone()
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load residuals by parameter name; they replace all that are there."""
        self._views = {}
        self._version += 1
        self._loaded = dict(state)
