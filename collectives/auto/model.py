"""One DDP model under ``collectives.auto``: timed plain, then with our hook, then settled.

    PLAIN    nothing is registered; the backwards that reduce are counted and timed
    CHECK    the first backward with our hook: each bucket is compared with what the process group gives
    OURS     our hook, timed
    settled  ours, forwarding, the user's own hook, or left alone; nothing is watched any more

Ranks must register at the same backward, and a rank may run forwards that others don't. So backwards are counted, by
the gradients that arrive after a forward that prepared a reduction; and that all ranks stand between the same two is
made sure of in `meeting`. Later decisions are taken inside of the hook, which DDP calls alike on all ranks.
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
from .meeting import all_alike
from .report import say
from .trial import Trial

__all__ = ["Model"]

_WARMUP = 3  # backwards that aren't timed: buckets are made anew after the first, memory and caches warm up
_TIMED = 10
_MARGIN = 0.02  # ours stays unless plain DDP is faster by more than this


class Model:
    """What is known of one DDP object; held by a table and, once registered, by its reducer. Never pickled."""

    def __init__(self, ddp, settings: dict | None, number: int = 0):
        self.watching = False
        self.registered = False  # our hook is on the reducer, and can't be taken off
        self.given_up = False  # the user's hook is called in its place
        self._ddp = weakref.ref(ddp)
        self._name = type(ddp.module).__name__
        self._group = ddp.process_group
        self._settings = settings
        self._state = None
        # What the hook does with a bucket: a plain function of (model, bucket). A bound method would be a cycle, which
        # keeps the process group until a collection comes; Gloo's may hang when it goes with the interpreter.
        self._act = None
        self._handles = []
        self._due = False  # a forward has prepared a reduction
        self._queued = False
        self._reduced = False  # ... and its backward has ended
        self._backwards = 0  # with our hook, those that the hook has seen
        self._begin = self._end = None
        self._times = {"plain": [], "ours": []}
        if settings is None or self._group.size() == 1:
            return
        publish_process()
        reason = _why_not(ddp)
        if reason:
            self.leave_alone(reason)
        else:
            # Now, when no rank has trained it: later a rank may have stepped that another one waits for.
            self._fingerprint = f"{number}:{_fingerprint(ddp)}"
            self._watch(ddp)

    # ---- Around each forward, while watching.

    def before_forward(self, ddp) -> None:
        """Take in the backward that has ended since; register the hook when it is time."""
        if self._act is not None and not self._timing():
            self._unwatch()
            return
        if self._reduced:
            self._reduced = self._due = False
            self._keep_time()
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
        if self.watching and _will_reduce(ddp):
            self._due, self._queued, self._reduced = True, False, False
            self._begin = self._now()

    # ---- When a backward has ended, DDP's own end of it included.

    def _watch(self, ddp) -> None:
        self.watching = True
        came = torch.compiler.disable(self._gradient_came)  # a backward inside of a compiled function runs it, too
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(came))

    def _unwatch(self) -> None:
        self.watching = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._times = {"plain": [], "ours": []}
        self._begin = self._end = None

    def _gradient_came(self, parameter) -> None:
        if self._due and not self._queued:
            self._queued = True
            _at_end_of_backward(torch.compiler.disable(self._backward_ended))

    def _backward_ended(self) -> None:
        # Behind DDP's own, which waits for the buckets.
        _at_end_of_backward(torch.compiler.disable(self._reduction_ended))

    def _reduction_ended(self) -> None:
        self._queued, self._reduced = False, True
        self._end = self._now()

    def _now(self):
        ddp = self._ddp()
        if ddp is None or ddp.device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(ddp.device))
        return event

    def _keep_time(self) -> None:
        self._times["ours" if self.registered else "plain"].append((self._begin, self._end))

    def _median(self, kind: str) -> float:
        """Seconds of the timed backwards, -1 where there are none. On CUDA it waits for the last one."""
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
        device = ddp.device
        error = None
        try:
            get_engine(None, device.type)
            self._state = HookState(process_group=self._group, **self._settings)
        except Exception as problem:  # all ranks are told, and stay with plain DDP
            error = f"{type(problem).__name__}: {problem}"
        value = {"error": error, "settings": self._settings, "model": self._fingerprint, "step": self._backwards}
        try:
            reason = all_alike(self._group, value)
        except RuntimeError as problem:
            reason = f"{type(problem).__name__}: {problem}"
        if reason:
            self._state = None
            self.leave_alone(reason, logging.WARNING)
            return
        self._trial = Trial(self._group, self._state, self._settings)
        self._act = Model._check
        self._backwards = 0
        ddp.register_comm_hook(self, torch.compiler.disable(_auto_allreduce))
        # The list is for compiled autograd alone, and would be pickled with the object.
        ddp._comm_hooks.pop()
        self.registered = True

    def leave_alone(self, reason: str, level: int = logging.INFO) -> None:
        """Stay with plain DDP, or with the user's hook, for good."""
        self._unwatch()
        self._say(level, f"left alone: {reason}")

    def give_way(self, hook) -> None:
        """Call the user's hook from now on."""
        self.given_up = True
        self._act = lambda model, bucket: hook(bucket)
        self._state = self._trial = None
        self._say(logging.INFO, "a hook was registered, which takes the place of ours")

    # ---- What the hook does with a bucket, one phase after the other.

    def _timing(self) -> bool:
        return self._act in (Model._check, Model._timed)

    def _check(self, bucket):
        future = self._trial.reduce(bucket)
        if bucket.is_last():
            trial, self._trial = self._trial, None
            problem = trial.problem
            if problem:
                self._settle(Model._forward)
                self._say(
                    logging.WARNING,
                    f"the first step with fused_allreduce went wrong ({problem}), and took the process group's result: "
                    "plain DDP from here on, on all ranks",
                    everywhere=trial.own_problem,
                )
            else:
                self._act = Model._timed
        return future

    def _timed(self, bucket):
        if bucket.index() == 0 and self._backwards == _WARMUP + _TIMED:
            self._decide(bucket.buffer().device)
            return self._act(self, bucket)
        if bucket.is_last():
            self._backwards += 1
        return fused_allreduce(self._state, bucket)

    def _decide(self, device) -> None:
        medians = torch.tensor([self._median("plain"), self._median("ours")], dtype=torch.float64, device=device)
        dist.all_reduce(medians, dist.ReduceOp.MAX, group=self._group)
        plain, ours = medians.tolist()
        if plain <= 0 or ours <= 0:
            self._settle(Model._ours)
            self._say(logging.INFO, "fused_allreduce, checked; its gain could not be measured")
            return
        figures = f"{plain * 1e3:.3g} ms a backward with plain DDP, {ours * 1e3:.3g} ms with fused_allreduce"
        if plain < (1 - _MARGIN) * ours:
            self._settle(Model._forward)
            self._say(logging.INFO, f"{figures}: plain DDP stays")
        else:
            self._settle(Model._ours)
            self._say(logging.INFO, f"{figures} ({plain / ours:.2f} times as fast): fused_allreduce stays")

    def _settle(self, act) -> None:
        self._act = act
        if act is Model._forward:
            self._state = None

    def _ours(self, bucket):
        return fused_allreduce(self._state, bucket)

    def _forward(self, bucket):
        """What DDP does without a hook."""
        return _sum_over(self._group, bucket.buffer().div_(self._group.size()))

    def _say(self, level: int, text: str, everywhere: bool = False) -> None:
        if everywhere or self._group.rank() == 0:
            settings = "".join(f" {name}={value}" for name, value in (self._settings or {}).items())
            say(level, f"DistributedDataParallel({self._name}){settings}: {text}")


def _auto_allreduce(model, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return model._act(model, bucket)


def _sum_over(group, tensor):
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def _at_end_of_backward(function) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _will_reduce(ddp) -> bool:
    return torch.is_grad_enabled() and ddp.require_backward_grad_sync


def _fingerprint(ddp) -> str:
    """Tells this model from another one; alike on all ranks, since their parameters are."""
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    some = [p.detach().flatten()[:16].cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in parameters[:4]]
    text = repr((type(ddp.module).__name__, len(parameters), sum(p.numel() for p in parameters)))
    return hashlib.sha256(text.encode() + b"".join(some)).hexdigest()[:16]


def _why_not(ddp) -> str:
    """Say why a DDP object is left alone, or nothing."""
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
