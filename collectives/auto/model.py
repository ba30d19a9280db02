"""State of one DDP model under ``collectives.auto``, which goes through these phases:

    PLAIN    no hook is registered; the backwards that reduce are counted and timed
    CHECK    the first backward with our hook: each bucket is compared with the process group's
    OURS     our hook, timed
    decided  our hook, or forwarding to the process group, the user's own hook, or left alone; the
             model isn't observed any more

Ranks must register at the same backward, and a rank may run forwards that others don't. So each
rank counts backwards, by the gradients that are made after a forward that prepared a reduction, and
`consensus` verifies that all ranks are between the same two. Later decisions are made inside of the
hook, which DDP calls equally on all ranks.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations as objects.

import hashlib
import logging
import time
import weakref

import torch
import torch.distributed as dist

from ..comm.engine import get_engine
from ..comm.liveness import publish_process
from ..ddp.hook import HookState, fused_allreduce
from ..gradients.unused_states import forget
from .consensus import verify_same_step
from .presence import Presence, was_missed
from .report import log_line
from .trial import Trial

__all__ = ["Model"]

_WARMUP = 3  # backwards that aren't timed: DDP rebuilds buckets after the first, memory and caches warm up
_TIMED = 10
_MARGIN = 0.02  # ours stays unless plain DDP is faster by more than this


class Model:
    """State of one DDP object. Never pickled.

    The table of `install` holds it, and so does DDP's reducer once the hook is registered.
    """

    def __init__(self, ddp, settings: dict | None, presence: Presence | None = None):
        self.observing = False
        self.registered = False  # our hook is registered, and can't be removed
        self.user_hook_active = False  # our hook calls the user's
        self._ddp = weakref.ref(ddp)
        self._name = type(ddp.module).__name__
        self._group = ddp.process_group
        self._settings = settings
        self._presence = presence  # None: the object was built before collectives.auto was imported
        self._state = None
        # What the hook does with a bucket: a plain function of (model, bucket). A bound method
        # would be a reference cycle, which keeps the process group until a garbage collection;
        # Gloo's may hang when it ends with the interpreter.
        self._reduce = None
        self._handles = []
        self._reduction_prepared = False  # a forward has prepared a reduction
        self._callback_queued = False
        self._reduced = False  # that forward's backward has ended
        self._backwards = 0  # with our hook, those in which it was called
        self._begin = self._end = None
        self._times = {"plain": [], "ours": []}
        if settings is None or self._group.size() == 1:
            return
        publish_process()
        reason = _reason_to_skip(ddp)
        if reason:
            self.leave_alone(reason)
        else:
            # Now, before any rank has trained it: later one rank may have stepped, and another one
            # not.
            # The number distinguishes objects with equal parameters.
            self._fingerprint = f"{presence.number if presence else 0}:{_fingerprint(ddp)}"
            self._start_observing(ddp)

    # ---- Around each forward, while the model is observed.

    def before_forward(self, ddp) -> None:
        """Record the backward that has ended since the last forward.

        Register the hook when it is time.
        """
        if self._reduce is not None and not self._is_timing():
            self._stop_observing()
            return
        if self._reduced:
            self._reduced = self._reduction_prepared = False
            self._times["ours" if self.registered else "plain"].append((self._begin, self._end))
            if not self.registered:
                self._backwards += 1
        if self.registered or not _will_reduce(ddp):
            return
        if ddp._comm_hooks:
            self.leave_alone("it has a hook of its own")
        elif ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            self.leave_alone("join() divides by the ranks that are left, which a hook isn't told")
        elif self._backwards >= _WARMUP + _TIMED and not ddp._join_config.enable:
            self._register(ddp)

    def after_forward(self, ddp) -> None:
        """Start the clock for the backward that belongs to this forward, if it reduces."""
        if self.observing and _will_reduce(ddp):
            self._reduction_prepared, self._callback_queued, self._reduced = True, False, False
            self._begin = self._now()

    # ---- The end of a backward, after DDP's own callback.

    def _start_observing(self, ddp) -> None:
        self.observing = True
        hook = torch.compiler.disable(self._on_gradient)  # a backward inside of a compiled function calls it, too
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _stop_observing(self) -> None:
        self.observing = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._times = {"plain": [], "ours": []}
        self._begin = self._end = None

    def _on_gradient(self, parameter) -> None:
        if self._reduction_prepared and not self._callback_queued:
            self._callback_queued = True
            _at_end_of_backward(torch.compiler.disable(self._backward_ended))

    def _backward_ended(self) -> None:
        # After DDP's own callback, which waits for the buckets.
        _at_end_of_backward(torch.compiler.disable(self._reduction_ended))

    def _reduction_ended(self) -> None:
        self._callback_queued, self._reduced = False, True
        self._end = self._now()

    def _now(self):
        ddp = self._ddp()
        if ddp is None or ddp.device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(ddp.device))
        return event

    def _median(self, kind: str) -> float:
        """Return the median seconds of the timed backwards, -1 without any.

        On CUDA it waits for the last one.
        """
        spans = [(a, b) for a, b in self._times[kind][_WARMUP:] if a is not None and b is not None]
        if not spans:
            return -1.0
        if isinstance(spans[0][0], float):
            seconds = sorted(end - begin for begin, end in spans)
        else:
            spans[-1][1].synchronize()
            seconds = sorted(begin.elapsed_time(end) / 1e3 for begin, end in spans)
        return seconds[len(seconds) // 2]

    # ---- Registering.

    def _register(self, ddp) -> None:
        missing = self._find_missing()
        if missing:
            self.leave_alone(missing, logging.WARNING, everywhere=True)
            return
        device = ddp.device
        error = None
        try:
            get_engine(None, device.type)
            self._state = HookState(process_group=self._group, **self._settings)
            forget(self._state)
        except Exception as problem:  # all ranks get it, and stay with plain DDP
            error = f"{type(problem).__name__}: {problem}"
        value = {"error": error, "settings": self._settings, "model": self._fingerprint, "step": self._backwards}
        try:
            reason = verify_same_step(self._group, value)
        except RuntimeError as problem:
            reason = f"{type(problem).__name__}: {problem}"
        if reason:
            self._state = None
            self.leave_alone(reason, logging.WARNING)
            return
        self._trial = Trial(self._group, self._state, self._settings)
        self._reduce = Model._reduce_checked
        self._backwards = 0
        ddp.register_comm_hook(self, torch.compiler.disable(_auto_allreduce))
        # The list is for compiled autograd alone, and would be pickled with the object.
        ddp._comm_hooks.pop()
        self.registered = True

    def _find_missing(self) -> str:
        """Return which ranks can't come to the comparison, because they don't have ``collectives.auto``."""
        if self._presence is not None:
            return self._presence.describe_missing()
        if was_missed(self._group):
            return "this rank imported collectives.auto after it had built this object, and others before"
        return ""

    def leave_alone(self, reason: str, level: int = logging.INFO, everywhere: bool = False) -> None:
        """Keep plain DDP, or the user's hook, from now on."""
        self._stop_observing()
        self._log(level, f"left alone: {reason}", everywhere=everywhere)

    def use_user_hook(self, hook) -> None:
        """Call the user's hook from now on."""
        self.user_hook_active = True
        self._reduce = lambda model, bucket: hook(bucket)
        self._state = self._trial = None
        self._log(logging.INFO, "a hook was registered, which takes the place of ours")

    # ---- What the hook does with a bucket, phase by phase.

    def _is_timing(self) -> bool:
        return self._reduce in (Model._reduce_checked, Model._reduce_timed)

    def _reduce_checked(self, bucket):
        future = self._trial.reduce(bucket)
        if bucket.is_last():
            trial, self._trial = self._trial, None
            problem = trial.problem
            if problem:
                self._finish(Model._reduce_plain)
                self._log(
                    logging.WARNING,
                    f"the first step with fused_allreduce went wrong ({problem}), and took the process group's result: "
                    "plain DDP from here on, on all ranks",
                    everywhere=trial.own_problem,
                )
            else:
                self._reduce = Model._reduce_timed
        return future

    def _reduce_timed(self, bucket):
        if bucket.index() == 0 and self._backwards == _WARMUP + _TIMED:
            self._decide(bucket.buffer().device)
            return self._reduce(self, bucket)
        if bucket.is_last():
            self._backwards += 1
        return fused_allreduce(self._state, bucket)

    def _decide(self, device) -> None:
        medians = torch.tensor([self._median("plain"), self._median("ours")], dtype=torch.float64, device=device)
        dist.all_reduce(medians, dist.ReduceOp.MAX, group=self._group)
        plain, ours = medians.tolist()
        if plain <= 0 or ours <= 0:
            self._finish(Model._reduce_fused)
            self._log(logging.INFO, "fused_allreduce, checked; its gain could not be measured")
            return
        figures = f"{plain * 1e3:.3g} ms a backward with plain DDP, {ours * 1e3:.3g} ms with fused_allreduce"
        if plain < (1 - _MARGIN) * ours:
            self._finish(Model._reduce_plain)
            self._log(logging.INFO, f"{figures}: plain DDP stays")
        else:
            self._finish(Model._reduce_fused)
            self._log(logging.INFO, f"{figures} ({plain / ours:.2f} times as fast): fused_allreduce stays")

    def _finish(self, reduce) -> None:
        self._reduce = reduce
        if reduce is Model._reduce_plain:
            self._state = None

    def _reduce_fused(self, bucket):
        return fused_allreduce(self._state, bucket)

    def _reduce_plain(self, bucket):
        """Reduce as DDP does without a hook."""
        return _all_reduce(self._group, bucket.buffer().div_(self._group.size()))

    def _log(self, level: int, text: str, everywhere: bool = False) -> None:
        if everywhere or self._group.rank() == 0:
            settings = "".join(f" {name}={value}" for name, value in (self._settings or {}).items())
            log_line(level, f"DistributedDataParallel({self._name}){settings}: {text}")


def _auto_allreduce(model, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return model._reduce(model, bucket)


def _all_reduce(group, tensor):
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def _at_end_of_backward(function) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _will_reduce(ddp) -> bool:
    return torch.is_grad_enabled() and ddp.require_backward_grad_sync


def _fingerprint(ddp) -> str:
    """Return a hash of the model; the same on all ranks, because their parameters are."""
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    some = [p.detach().flatten()[:16].cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in parameters[:4]]
    text = repr((type(ddp.module).__name__, len(parameters), sum(p.numel() for p in parameters)))
    return hashlib.sha256(text.encode() + b"".join(some)).hexdigest()[:16]


def _reason_to_skip(ddp) -> str:
    """Return why a DDP object is left alone, or ""."""
    if ddp._comm_hooks:
        return "it has a hook of its own"
    if ddp.mixed_precision is not None:
        return "mixed_precision registers a hook of its own"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        return "its optimizer runs in the backward"
    if ddp._use_python_reducer:
        return 'optimize_ddp="python_reducer" has no buckets'
    if ddp._delay_all_reduce_params:
        return "it delays the all-reduce of some parameters"
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        return "skip_all_reduce_unused_params leaves out buckets"
    if ddp.is_multi_device_module or ddp.device_type not in ("cpu", "cuda"):
        return f"no engine works on its device(s), {ddp.device_type}"
    for module in ddp.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            return "it has sparse gradients"
    return ""
